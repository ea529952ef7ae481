"""Who may call: keys, tokens and certificates that name callers, and the gate at which every request shows one."""
