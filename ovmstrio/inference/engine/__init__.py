"""A language model in a process of its own: a program that makes many texts side by side.

::

    server                                              engine process (no event loop)
    first      options ───────────────────────────>    openvino_genai's continuous batching, warmed
               <──────────────── ["loaded", facts]
    a request  ["add", id, request] ───────────────>    template, tokens ─> queue ─> batch
               <── ["accepted", ...] or ["refused"]
               ["cancel", id] ─────────────────────>    seen before the next step
               <──────── [rows, failures, figures]          one frame a step, for all texts together

Everything that steps, tokenizes or renders holds the interpreter's lock, up to seconds: nothing of it is in the server.
"""
