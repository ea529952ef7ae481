"""Language-model engine: continuous batching in a separate process.

::

    server                                              engine process (no event loop)
    first      options ───────────────────────────>    openvino_genai's continuous batching, warmed
               <──────────────── ["loaded", facts]
    a request  ["add", id, request] ───────────────>    template, tokens ─> queue ─> batch
               <── ["accepted", ...] or ["refused"]
               ["cancel", id] ─────────────────────>    read before the next step
               <──────── [rows, failures, figures]          one frame per step, for all sequences

Steps, tokenization and rendering hold the GIL for up to seconds, so none of them runs in the server.
"""
