"""Authentication and quotas: API keys, tokens, client certificates, scopes and the gate that checks them."""
