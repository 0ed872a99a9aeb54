"""Makes the package's table of offers from raw price tables.

    .venv/bin/python scripts/make_offers.py ../shared/data/offers

reads every table of the folder, writes src/slipstream/plan/tables/offers.csv, and prints how many rows were taken and
why the others were left out. What is odd in a raw table is mended here; what any table may have, the reader handles.
"""

import argparse
import csv
import io
import sys
from collections import Counter
from pathlib import Path

from slipstream.plan.accelerators import variants
from slipstream.plan.offer_table import Offer, parse_table, table_text

TARGET = Path(__file__).parent.parent / "src/slipstream/plan/tables/offers.csv"
NOT_TABLES = {"all_cheapest.csv": "a summary of the others"}
AUCTION = "mithril sells by auction: the price is the floor of the bids, not what one pays"
PLACEHOLDER = "a TPU slice for as much as a spot one, whatever its size: a placeholder, not a price"


def main() -> None:
    """Read the folder, write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where the raw tables (*.csv) are")
    parser.add_argument("--output", type=Path, default=TARGET)
    arguments = parser.parse_args()
    taken: dict[tuple[str, str, str, str], Offer] = {}
    left_out: Counter[str] = Counter()
    for path in sorted(arguments.folder.glob("*.csv")):
        if path.name not in NOT_TABLES:
            reading = parse_table(mended(path, left_out), str(path))
            left_out.update(reading.left_out)
            for offer in reading.offers:
                keep_cheaper(offer, taken, left_out)
    if not taken:
        sys.exit(f"{arguments.folder} has no table of offers")
    offers = sorted(
        taken.values(), key=lambda offer: (offer.cloud, offer.machine, offer.accelerator.name, offer.region)
    )
    arguments.output.write_text(table_text(offers), encoding="utf-8")
    print(f"{len(offers):,} rows taken into {arguments.output} ({arguments.output.stat().st_size:,} bytes)")
    print(f"{left_out.total():,} rows left out:")
    for reason, number in left_out.most_common():
        print(f"  {number:>5,}  {reason}")


def keep_cheaper(offer: Offer, taken: dict[tuple[str, str, str, str], Offer], left_out: Counter[str]) -> None:
    """Of the same machine in the same region only the cheaper one is kept."""
    key = (offer.cloud, offer.machine, offer.accelerator.name, offer.region)
    if key in taken:
        left_out["the same machine in the same region, for as much or more"] += 1
        offer = min(offer, taken[key], key=lambda each: each.price)
    taken[key] = offer


def mended(path: Path, left_out: Counter[str]) -> str:
    """The text of a raw table, without what is known to be wrong in it."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = list(csv.DictReader(file))
    text = io.StringIO()
    writer = csv.DictWriter(text, rows[0] if rows else [], lineterminator="\n")
    writer.writeheader()
    for row in rows:
        if reason := no_price(row):
            left_out[reason] += 1
        else:
            writer.writerow(mend_vast(row) if row["Cloud"] == "vast" else row)
    return text.getvalue()


def no_price(row: dict[str, str]) -> str | None:
    """Why the figure in the price column is not what one would pay; None if it is."""
    if row["Cloud"] == "mithril":
        return AUCTION
    return PLACEHOLDER if row["InstanceType"] == "TPU-VM" and row["Price"] == row["SpotPrice"] else None


def mend_vast(row: dict[str, str]) -> dict[str, str]:
    """Vast gives the memory of all GPUs together where it can, and `State, COUNTRY, CONTINENT` as the region."""
    each = float(row["GpuMemGiB"] or 0) / float(row["AcceleratorCount"])
    shared = any(abs(known.memory / 2**30 - each) < 0.15 * each for known in variants(row["AcceleratorName"]))
    country = row["Region"].split(",")[-2].strip()
    return {**row, "GpuMemGiB": f"{each:.1f}" if shared else row["GpuMemGiB"], "Region": country}


if __name__ == "__main__":
    main()
