"""Load time of the web page in headless Chromium on this machine.

python benchmarks/web_page.py [--rounds 7] [--url http://127.0.0.1:8000]

Without --url, a server with the built-in model is started. Each round uses a new browser profile with an empty cache.
The results are medians.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
from contextlib import ExitStack
from pathlib import Path

from playwright.sync_api import sync_playwright

sys.path.insert(0, str(Path(__file__).parent.parent / "tests/support"))

from serving import Served


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="number of rounds (default: 7)")
    parser.add_argument("--url", default="", help="URL of a running server (default: start one)")
    args = parser.parse_args()
    paints, models, sizes = [], [], []
    with ExitStack() as stack:
        url = args.url or stack.enter_context(Served()).root
        playwright = stack.enter_context(sync_playwright())
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for _ in range(args.rounds):
            context = browser.new_context()
            page = context.new_page()
            received: list[int] = []
            page.on("requestfinished", lambda one, to=received: to.append(one.sizes()["responseBodySize"]))
            page.goto(url)
            page.wait_for_selector("#model option", state="attached")
            models.append(page.evaluate("performance.now()"))
            paints.append(page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime"))
            sizes.append(sum(received))
            context.close()
        browser.close()
    print("| first contentful paint, ms | models listed, ms | kB |\n|---:|---:|---:|")
    print(
        "| "
        + " | ".join(f"{statistics.median(values):.0f}" for values in (paints, models, [s / 1000 for s in sizes]))
        + " |"
    )


if __name__ == "__main__":
    main()
