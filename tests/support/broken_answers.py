"""A server that breaks its answers off."""

from __future__ import annotations

from tests.support.plain_http import QuietHandler


class BreakingHandler(QuietHandler):
    """Begins to answer, and closes the connection."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:  # noqa: N802 - the library's name
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(200)
        self.send_header("Content-Type", "audio/wav" if self.path.endswith("speech") else "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.wfile.write(b"6\r\n: half\r\n")
        self.close_connection = True
