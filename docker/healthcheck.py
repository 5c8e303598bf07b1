"""The image's health check: exit code 0 if the server generates a token.

`/health_generate` needs no API key.
"""

from __future__ import annotations

import os
import sys
import urllib.request

TIMEOUT_SECONDS = 15.0


def main() -> int:
    url = f"http://127.0.0.1:{os.environ.get('SGLANG_SPARSE_PORT', '30000')}/health_generate"
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS):
            return 0
    except (OSError, ValueError) as error:
        print(f"{url}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
