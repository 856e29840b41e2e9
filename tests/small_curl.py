"""As much of curl as the pages in docs/ use, for machines without it: small_curl.py [-s] [-i] [-X M] [-H H] [-d D] U"""

from __future__ import annotations

import argparse
import sys
import urllib.error
import urllib.request

parser = argparse.ArgumentParser()
parser.add_argument("-s", action="store_true")
parser.add_argument("-i", action="store_true")
parser.add_argument("-N", action="store_true")
parser.add_argument("-X", default=None)
parser.add_argument("-H", action="append", default=[])
parser.add_argument("-d", default=None)
parser.add_argument("url")
asked = parser.parse_args()
headers = dict(header.split(": ", 1) for header in asked.H)
body = None if asked.d is None else asked.d.encode()
try:
    response = urllib.request.urlopen(urllib.request.Request(asked.url, body, headers, method=asked.X))
except urllib.error.HTTPError as error:
    response = error
with response:
    if asked.i:
        print(f"HTTP/1.1 {response.status} {response.reason}\n{response.headers}", end="", flush=True)
    sys.stdout.buffer.write(response.read())
