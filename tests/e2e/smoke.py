"""One text and one image request to a server that somebody else has started: python -m tests.e2e.smoke [--wait S]."""

import argparse
import sys
import time

import httpx
import openai

from tests.e2e.pictures import about, image_part, shape


def wait_ready(base_url: str, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            if httpx.get(f"{base_url}/health/ready", timeout=10).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        if time.monotonic() > deadline:
            raise SystemExit(f"{base_url} is not ready after {timeout_s:.0f} s")
        time.sleep(0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000")
    parser.add_argument("--wait", type=float, default=0.0, help="seconds that the server may take to become ready")
    options = parser.parse_args()
    wait_ready(options.base_url, options.wait)
    with openai.OpenAI(base_url=f"{options.base_url}/v1", api_key="none", max_retries=0, timeout=120) as client:

        def ask(messages: list, expected: str) -> None:
            answer = client.chat.completions.create(model="demo", messages=messages).choices[0].message.content or ""
            sys.stdout.write(f"{answer}\n")
            if expected not in answer:
                raise SystemExit(f"expected {expected!r} in {answer!r}")

        ask([{"role": "user", "content": "What is 12 + 30?"}], "42")
        ask(about("What is in the image?", image_part(shape("blue", "square"))), "blue square")


if __name__ == "__main__":
    main()
