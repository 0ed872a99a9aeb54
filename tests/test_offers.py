"""What can be rented: the tables, the command that lists them, and newer tables from files and addresses."""

import datetime
import http.server
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from program import slipstream
from slipstream.plan.accelerators import accelerators, find_accelerator, variants
from slipstream.plan.nodes import find_node, nodes
from slipstream.plan.offer_table import COLUMNS, Offer, parse_table, read_table, table_text
from slipstream.plan.offers import cheapest_offers, filter_offers, load_offers, refresh, refreshed_table, stale

TABLES = Path(__file__).parent.parent / "src/slipstream/plan/tables"
SCRIPT = Path(__file__).parent.parent / "scripts/make_offers.py"
HEADER = ",".join(COLUMNS)
GOOD = "aws,p5.48xlarge,H100,8,80,192,2048,us-east-1,50.5,20.25,2026-11-01"
TODAY = datetime.date(2026, 11, 15)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))


def write(folder: Path, *rows: str, header: str = HEADER) -> Path:
    path = folder / "table.csv"
    path.write_text("\n".join([header, *rows]) + "\n")
    return path


def test_every_figure_has_a_source_and_a_date():
    import csv

    for name in ("accelerators.csv", "nodes.csv"):
        with (TABLES / name).open() as file:
            rows = list(csv.DictReader(file))
        assert rows
        for row in rows:
            assert len(row["source"]) > 8, row
            assert 2017 <= int(row["date"][:4]) <= 2026 and len(row["date"]) in (4, 7), row
    assert all(offer.date.year >= 2025 for offer in load_offers())


def test_figures_are_plausible():
    for each in accelerators().values():
        assert 2**30 <= each.memory < 2**39 and each.linked >= 1
        assert each.peaks.get("bf16", 0) == 0 or each.peaks["bf16"] >= 2 * each.peaks.get("fp32", 0) * 0.99
        assert each.peaks.get("fp8", 0) <= 2.05 * each.peaks.get("bf16", 1e18), "dense rates, each half of the next"
        assert each.link <= each.bandwidth
    rates = accelerators()
    assert rates["H100"].peaks["bf16"] == 989.4e12 and rates["A100-80GB"].peaks["bf16"] == 312e12, "without sparsity"
    assert "bf16" not in rates["V100-16GB"].peaks and "fp8" not in rates["A100-80GB"].peaks
    assert rates["H100"].link == 450e9 and rates["A100-80GB"].link == 300e9, "one direction"


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("h100", "H100"), ("H100-80GB", "H100"), ("A100 80GB", "A100-80GB"), ("a100-80gb-sxm", "A100-80GB"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"), ("NVIDIA A100-PCIE-40GB", "A100-40GB-PCIe"),
        ("NVIDIA H100 80GB HBM3", "H100"), ("H100-80G-SXM5", "H100"), ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("Tesla V100-SXM2-16GB", "V100-16GB"), ("Tesla T4", "T4"), ("A10G-24GB", "A10G"), ("A10", "A10"),
        ("AMD Instinct MI300X", "MI300X"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"), ("RTXA6000", "RTX-A6000"), ("A6000", "RTX-A6000"),
        ("RTX6000Ada", "RTX-6000-Ada"), ("RTX PRO Server 6000", "RTX-PRO-6000"), ("TPUv5e", "TPU-v5e"),
        ("tpu-v5litepod", "TPU-v5e"), ("TPU7x (Ironwood)", "TPU-v7x"), ("CPU", "cpu"),
    ],
)  # fmt: skip
def test_loose_spellings(written, meant):
    assert find_accelerator(written).name == meant


def test_every_accelerator_is_found_by_its_own_name_and_no_spelling_means_two():
    import csv

    with (TABLES / "accelerators.csv").open() as file:
        for row in csv.DictReader(file):
            for spelling in (row["name"], *filter(None, row["aliases"].split("|"))):
                assert find_accelerator(spelling).name == row["name"], spelling


def test_unknown_and_ambiguous_accelerators_are_named():
    with pytest.raises(ValueError, match=r"unknown accelerator 'H1000' \(did you mean 'H100'.*known: V100-16GB"):
        find_accelerator("H1000")
    with pytest.raises(ValueError, match=r"'A100' is the name of several.*A100-40GB, A100-80GB"):
        find_accelerator("A100")
    assert [each.name for each in variants("H100-SXM")] == ["H100"]
    assert {each.name for each in variants("h100")} >= {"H100", "H100-PCIe", "H100-NVL"}
    assert "L40S" not in {each.name for each in variants("L40")}


def test_the_packages_table_is_small_and_whole():
    assert (TABLES / "offers.csv").stat().st_size < 400_000
    text = (TABLES / "offers.csv").read_text()
    reading = parse_table(text, "offers.csv")
    assert not reading.left_out, "each of its accelerators is known"
    assert table_text(reading.offers) == text, "and written as we write"
    offers = load_offers()
    assert len(offers) > 4000 and len({offer.cloud for offer in offers}) > 20
    for offer in offers:
        assert offer.count >= 1 and 0.01 < offer.price_per_accelerator < 100, offer
        assert offer.link > 0 and offer.network > 0
    have = {offer.accelerator.name for offer in offers}
    assert have >= {"V100-16GB", "T4", "A10G", "L4", "L40S", "A100-40GB", "A100-80GB", "H100", "H200", "B200", "MI300X"}
    assert have >= {"TPU-v4", "TPU-v5e", "TPU-v5p", "TPU-v6e"}


def test_the_wires_of_machines():
    known = {(offer.cloud, offer.machine): offer for offer in load_offers()}
    p5 = known["aws", "p5.48xlarge"]
    assert (p5.network, p5.network_kind, p5.network_assumed, p5.link_kind) == (4e11, "EFA", False, "NVLink4")
    assert known["azure", "Standard_NC24ads_A100_v4"].accelerator.name == "A100-80GB-PCIe"
    assert known["azure", "Standard_ND96isr_H100_v5"].network_kind == "InfiniBand"
    pod = known["gcp", "tpu-v5p-128"]
    assert pod.count == 64 and pod.network == 64 * 50e9 / 8, "a slice is one machine, with the network of all its chips"
    assert known["aws", "g6e.48xlarge"].link_kind == "PCIe4"
    assert known["hyperbolic", "1x-H100-75-722"].network_assumed
    stranger = find_node("nowhere", "anything")
    assert stranger.assumed and stranger.network == 10e9 / 8


def test_no_row_of_wires_is_hidden_or_names_what_is_not_there():
    machines = {(offer.cloud, offer.machine) for offer in load_offers()}
    used = {find_node(cloud, machine) for cloud, machine in machines}
    for node in nodes():
        assert node.accelerator is None or node.accelerator in accelerators()
        fitting = [pair for pair in machines if pair[0] == node.cloud and fnmatchcase(pair[1], node.machine)]
        assert node in used or not fitting, f"{node.cloud} {node.machine} is hidden by a row above it"
    assert len(used) > 0.9 * len(nodes()), "and few are of machines that no table has"


def test_loading_needs_neither_torch_nor_numpy():
    code = """
import sys
from slipstream.plan.offers import load_offers
assert load_offers() and not {"torch", "numpy", "pandas", "urllib.request"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_filters():
    offers = load_offers()
    names = {offer.accelerator.name for offer in filter_offers(offers, gpu="a100")}
    assert names == {"A100-40GB", "A100-80GB", "A100-40GB-PCIe", "A100-80GB-PCIe"}
    assert {offer.accelerator.name for offer in filter_offers(offers, gpu="H200,tpu-v4")} == {"H200", "TPU-v4"}
    assert {offer.cloud for offer in filter_offers(offers, clouds=["AWS", "gcp"])} == {"aws", "gcp"}
    assert {offer.region for offer in filter_offers(offers, clouds=["aws"], regions=["us-east-*"])} == {
        "us-east-1",
        "us-east-2",
    }
    assert all(offer.spot for offer in filter_offers(offers, spot=True))
    assert filter_offers(offers, gpu="GB200") == (), "known, and not to be had"
    with pytest.raises(ValueError, match=r"unknown cloud 'amazon'.*azure"):
        filter_offers(offers, clouds=["amazon"])
    with pytest.raises(ValueError, match=r"region 'us-east-11' \(did you mean 'us-east-1'"):
        filter_offers(offers, clouds=["aws"], regions=["us-east-11"])


def test_the_cheapest_region_is_chosen_by_the_price_that_is_paid(tmp_path):
    path = write(
        tmp_path,
        "aws,p5.48xlarge,H100,8,80,192,2048,us-east-1,50,30,2026-11-01",
        "aws,p5.48xlarge,H100,8,80,192,2048,us-west-2,60,20,2026-11-01",
    )
    offers = read_table(path)
    assert [offer.region for offer in cheapest_offers(offers)] == ["us-east-1"]
    assert [offer.region for offer in cheapest_offers(offers, spot=True)] == ["us-west-2"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("aws,p5.48xlarge,H100,8,80,192,2048,us-east-1,50.5", r"table.csv:3: 9 columns, and the first line has 11"),
        (GOOD.replace("aws", ""), r"table.csv:3: Cloud: is empty"),
        (GOOD.replace("50.5", "cheap"), r"table.csv:3: Price: needs a number of at least 0, not 'cheap'"),
        (GOOD.replace("50.5", "-1"), r"table.csv:3: Price: needs a number of at least 0, not '-1'"),
        (GOOD.replace("50.5", "nan"), r"table.csv:3: Price: needs a number"),
        (GOOD.replace("50.5", "0"), r"table.csv:3: Price: nothing is rented for nothing"),
        (GOOD.replace("20.25", "inf"), r"table.csv:3: SpotPrice: needs a number"),
        (GOOD.replace(",8,", ",eight,"), r"table.csv:3: AcceleratorCount: needs a number"),
        (GOOD.replace(",8,", ",,"), r"table.csv:3: AcceleratorCount: needs a number of at least 0, not an empty value"),
        (GOOD.replace(",8,", ",2.5,"), r"table.csv:3: AcceleratorCount: '2.5' is not a number of accelerators"),
        (GOOD.replace("192", "many"), r"table.csv:3: vCPUs: needs a number"),
        (GOOD.replace("2048", "2 TB"), r"table.csv:3: MemoryGiB: needs a number"),
        (GOOD.replace("2026-11-01", "yesterday"), r"table.csv:3: CatalogDate: needs a date such as .*'yesterday'"),
        ('aws,"p5', r"table.csv:3: not CSV"),
    ],
)
def test_a_bad_row_is_named_and_nothing_is_kept(row, message, tmp_path):
    path = write(tmp_path, GOOD, row)
    with pytest.raises(ValueError, match=message):
        read_table(path)
    with pytest.raises(ValueError, match=message):
        refresh(path)
    assert not refreshed_table().exists()


def test_rows_of_what_we_do_not_rent_are_counted_and_no_errors(tmp_path):
    rows = (
        GOOD,
        "aws,inf2.xlarge,Inferentia2,1,32,4,16,us-east-1,0.76,,2026-11-01",
        "aws,g6f.large,L4,0.125,2.8,2,8,us-east-1,0.2,,2026-11-01",
        "gcp,,T4,1,16,,,us-east1,0.35,0.1,2026-11-01",
        "aws,p5e.48xlarge,H200,8,141,192,2048,us-east-1,,23.9,2026-11-01",
        "seeweb,ECS1GPU3,A100,1,80,16,120,,0.99,,2026-11-01",
        "vast,1x-H200,H200,1,141,32,64,FR,2.35,0.0000,2026-11-01",
    )
    done = slipstream("offers", "refresh", write(tmp_path, *rows), "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["offers"] == 2 and told["clouds"] == ["aws", "vast"] and sum(told["left_out"].values()) == 5
    assert told["left_out"]["unknown accelerator Inferentia2"] == 1
    assert read_table(told["path"])[1].spot is None, "0 stands for no price"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no table of offers: Cloud"), (b"<html>not found</html>\n", "no table of offers"),
        (b"\x89PNG\r\n\x1a\n\xff", "binary"), (HEADER.encode() + b"\n", "no offer is in it"),
        (HEADER.replace("Price,", "", 1).encode() + b"\n", "Price missing in the first line"),
    ],
)  # fmt: skip
def test_what_is_no_table_is_refused(content, message, tmp_path):
    (tmp_path / "other.csv").write_bytes(content)
    done = slipstream("offers", "refresh", "other.csv", cwd=tmp_path)
    assert done.returncode == 2 and message in done.stderr and "other.csv" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and not refreshed_table().exists()


def test_a_newer_table_replaces_its_clouds_and_no_others(tmp_path):
    before = load_offers()
    refresh(write(tmp_path, GOOD))
    after = load_offers()
    assert [(offer.machine, offer.price) for offer in after if offer.cloud == "aws"] == [("p5.48xlarge", 50.5)]
    assert [offer for offer in after if offer.cloud != "aws"] == [offer for offer in before if offer.cloud != "aws"]
    refresh(write(tmp_path, "gcp,a3-highgpu-8g,H100,8,80,208,1872,us-east4,80,,2026-11-02"))
    last = load_offers()
    assert {offer.machine for offer in last if offer.cloud == "aws"} == {"p5.48xlarge"}, "the earlier refresh stays"
    kinds = {offer.accelerator.kind for offer in last if offer.cloud == "gcp"}
    assert kinds == {"gpu", "tpu"}, "Google's TPUs come in a table of their own"


def test_slices_of_tpu_pods_as_google_lists_them(tmp_path):
    header = "Cloud,InstanceType,AcceleratorName,Chips(derived),Region,Price,SpotPrice,CatalogDate,PricePerChip"
    row = "gcp,TPU-VM,tpu-v5litepod-16,16,us-west4,19.2,5.5,2026-11-01,1.2"
    (offer,) = read_table(write(tmp_path, row, header=header))
    assert (offer.machine, offer.accelerator.name, offer.count) == ("tpu-v5litepod-16", "TPU-v5e", 16)
    assert (offer.cores, offer.memory) == (0, 0)


def test_a_damaged_table_in_the_cache_is_named_and_a_refresh_mends_it(tmp_path):
    refresh(write(tmp_path, GOOD))
    refreshed_table().write_text(HEADER + "\n" + GOOD.replace("50.5", "cheap") + "\n")
    listed = slipstream("offers", cwd=tmp_path)
    assert listed.returncode == 2 and "offers.csv:2: Price" in listed.stderr and "remove" in listed.stderr
    refresh(write(tmp_path, GOOD))
    assert slipstream("offers", "--limit", "1", cwd=tmp_path).returncode == 0


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """A web server of this folder."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments, directory=str(tmp_path))

        def log_message(self, *arguments: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Quiet) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_refresh_from_an_address(address, tmp_path):
    write(tmp_path, GOOD)
    done = slipstream("offers", "refresh", f"{address}/table.csv", cwd=tmp_path)
    assert done.returncode == 0 and "1 offers of aws" in done.stdout, done.stderr
    listed = slipstream("offers", "--cloud", "aws", "--json", cwd=tmp_path)
    assert [row["price"] for row in json.loads(listed.stdout)["offers"]] == [50.5]
    gone = slipstream("offers", "refresh", f"{address}/other.csv", cwd=tmp_path)
    assert gone.returncode == 2 and "/other.csv: cannot be read: 404" in gone.stderr, gone.stderr


def test_an_address_that_does_not_answer(tmp_path):
    done = slipstream("offers", "refresh", "http://127.0.0.1:9/table.csv", cwd=tmp_path)
    assert done.returncode == 2 and "cannot be read" in done.stderr and "refused" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


def test_the_list(tmp_path):
    shown = slipstream("offers", "--gpu", "H100", "--cloud", "aws,gcp", "--sort", "price", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert "p5.48xlarge" in shown.stdout and "3,200" in shown.stdout and "EFA" in shown.stdout
    assert "a3-megagpu-8g" in shown.stdout and "oci" not in shown.stdout
    assert "days old; `slipstream offers refresh` reads newer ones" in " ".join(shown.stdout.split())
    rows = json.loads(slipstream("offers", "--gpu", "H100", "--json", cwd=tmp_path).stdout)["offers"]
    assert [row["price"] for row in rows] == sorted(row["price"] for row in rows)
    machines = [(row["cloud"], row["machine"], row["accelerator"]) for row in rows]
    assert len(machines) == len(set(machines)), "the cheapest region of each"
    for row in rows:
        assert row["price_per_accelerator"] == pytest.approx(row["price"] / row["count"])


def test_the_list_of_spot_prices_and_of_all_regions(tmp_path):
    words = ("offers", "--gpu", "A100-80GB", "--cloud", "aws", "--json")
    spot = json.loads(slipstream(*words, "--spot", "--all-regions", "--sort", "each", cwd=tmp_path).stdout)["offers"]
    prices = [row["spot_per_accelerator"] for row in spot]
    assert len({row["region"] for row in spot}) > 1 and prices == sorted(prices)
    assert len(json.loads(slipstream(*words, "--limit", "1", cwd=tmp_path).stdout)["offers"]) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--gpu", "H1000"), "unknown accelerator 'H1000' (did you mean 'H100'"),
        (("--cloud", "asw"), "unknown cloud 'asw' (did you mean 'aws'?); clouds with offers: aws, azure"),
        (("--sort", "prices"), "did you mean 'price'?); valid: price, each, gpu, memory"),
        (("--cloud", "aws", "--region", "mars"), "no such offer in region 'mars'"),
    ],
)
def test_wrong_names_are_answered_with_the_right_ones(words, message, tmp_path):
    done = slipstream("offers", *words, cwd=tmp_path)
    assert done.returncode == 2 and message in done.stderr and not done.stdout, done.stderr


def test_old_prices_say_so(tmp_path):
    offers = read_table(
        write(
            tmp_path,
            GOOD.replace("2026-11-01", "2026-09-16"),
            "azure,Standard_ND96isr_H100_v5,H100,8,80,96,1900,eastus,98,,2025-09-11",
        )
    )
    assert stale(offers[:1], TODAY) is None, "60 days are not too old"
    assert stale(offers[:1], TODAY + datetime.timedelta(1)) == (
        "prices of aws are 61 days old; `slipstream offers refresh` reads newer ones"
    )
    assert "prices of azure are 430 days old;" in stale(offers, TODAY)
    assert "prices of azure and aws are 61 to 431 days old;" in stale(offers, TODAY + datetime.timedelta(1))
    assert stale([], TODAY) is None
    assert "and 20 more clouds are" in stale(load_offers(), TODAY)


NAMES = st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"]), min_size=1, max_size=12)
PRICES = st.floats(0.01, 1e6, allow_nan=False)


@given(
    st.lists(
        st.tuples(
            NAMES, NAMES, st.sampled_from(sorted(accelerators())), st.integers(1, 4096), st.integers(0, 512),
            st.integers(0, 2**45), NAMES, PRICES, st.none() | PRICES, st.dates(datetime.date(2000, 1, 1)),
        ),
        max_size=8,
    )
)  # fmt: skip
def test_any_table_reads_back_as_it_was_written(rows):
    offers = []
    for cloud, machine, name, count, cores, memory, region, price, spot, date in rows:
        node, accelerator = find_node(cloud, machine), accelerators()[name]
        wires = (accelerator.link, accelerator.link_kind, node.network, node.network_kind, node.assumed)
        offers.append(Offer(cloud, machine, accelerator, count, cores, memory, region, price, spot, *wires, date))
    reading = parse_table(table_text(offers), "written")
    assert reading.offers == offers and not reading.left_out


def test_the_script_that_makes_the_packages_table(tmp_path):
    raw = tmp_path / "raw"
    raw.mkdir()
    write(raw, GOOD, "gcp,,P4,1,8,,,us-east1,0.6,,2026-11-01", "mithril,a100.8x,A100,8,80,204,1520,us,0.08,,2026-11-01")
    (raw / "vast.csv").write_text(
        f"{HEADER}\n"
        'vast,2x-A100_SXM4,A100,2,160,32,64,"Montana, US, NA",1.87,0.0,2026-11-01\n'
        'vast,2x-A100_SXM4,A100,2,160,32,64,", US, NA",1.99,0.0,2026-11-01\n'
    )
    (raw / "all_cheapest.csv").write_text("a summary\n")
    target = tmp_path / "offers.csv"
    done = subprocess.run(
        [sys.executable, SCRIPT, raw, "--output", target], capture_output=True, text=True, check=True, timeout=60
    )
    assert "2 rows taken" in done.stdout and "3 rows left out" in done.stdout and "auction" in done.stdout, done.stdout
    assert [(offer.cloud, offer.accelerator.name, offer.region, offer.price) for offer in read_table(target)] == [
        ("aws", "H100", "us-east-1", 50.5),
        ("vast", "A100-80GB", "US", 1.87),
    ]
