"""The image's health check: exit code 0 if the server generates a token.

`/health_generate` needs no API key.
"""

from __future__ import annotations

import http.client
import os
import sys
import urllib.request

TIMEOUT_SECONDS = 15.0


def main() -> int:
    url = f"http://127.0.0.1:{os.environ.get('SGLANG_SPARSE_PORT', '30000')}/health_generate"
    # Docker passes on the host's HTTP_PROXY, which does not lead back into the container.
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(url, timeout=TIMEOUT_SECONDS):
            return 0
    except (OSError, ValueError, http.client.HTTPException) as error:
        print(f"{url}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
