"""Reads a capture folder with five libraries and checks that all see the same values.

Usage: read_captures.py FOLDER ZONE
The folder holds three files: one failed call, three calls, one call with a null log-prob and with routing. ZONE is that of
this process's clock.
"""

import datetime
import glob
import math
import os
import sys
import tempfile
import time

os.environ["TZ"] = sys.argv[2]
time.tzset()
# Nothing is to be looked up.
os.environ["HF_HUB_OFFLINE"] = "1"

import datasets
import duckdb
import numpy
import pandas
import polars
import pyarrow.dataset
import pyarrow.parquet

folder = sys.argv[1]
pattern = f"{folder}/date=*/*.parquet"
files = sorted(glob.glob(pattern))
assert len(files) == 3, files

schemas = [pyarrow.parquet.read_schema(file) for file in files]
assert all(schema.equals(schemas[0]) for schema in schemas), "schemas differ"
assert all(pyarrow.types.is_null(field.type) is False for field in schemas[0])

RECEIVED = datetime.datetime.fromtimestamp(1_795_946_400, datetime.timezone.utc).replace(microsecond=123_456)
WANTED = {
    "nothing": (None, None, None, None),
    "a": ([1, 2, 4294967295], [3, 4], [-4 / 7, -5 / 7], 2),
    "b": ([5], [], [], 0),
    "c": ([1], [2, 3, 4], [-0.5, None, -0.25], 3),
    # None in a list is not a list that is None (F07); ids are no small integers, nor signed ones (F13).
    "d": ([0, 255, 32767, 65536, 151935, 2147483648, 4294967295], [7], [None], 1),
}


def check(library, rows):
    """`rows`: (session, received_at, prompt ids, completion ids, log-probs, completion tokens of usage)."""
    rows = list(rows)
    assert len(rows) == 5, (library, rows)
    for session, received_at, prompt, completion, logprobs, usage in rows:
        assert received_at == RECEIVED, (library, received_at)
        wanted = WANTED[session]
        assert (prompt, completion, usage) == (wanted[0], wanted[1], wanted[3]), (library, session, prompt, completion, usage)
        if wanted[2] is None:
            assert logprobs is None, (library, session, logprobs)
            continue
        assert len(logprobs) == len(completion) == usage, (library, session)
        for got, want in zip(logprobs, wanted[2], strict=True):
            assert (got is None) == (want is None) and (got is None or abs(got - want) < 1e-6), (library, session, logprobs)
    print(library, end=" ")


COLUMNS = ["session_id", "received_at", "prompt_token_ids", "completion_token_ids", "completion_logprobs", "usage"]


def of_dicts(rows):
    for row in rows:
        values = [row[name] for name in COLUMNS]
        usage = values.pop()
        yield *values, usage and usage["completion_tokens"]


table = pyarrow.dataset.dataset(folder, format="parquet", partitioning="hive", exclude_invalid_files=True).to_table()
assert {str(date) for date in table.column("date").to_pylist()} == {"2026-11-29"}
check("pyarrow", of_dicts(table.to_pylist()))


def plain(value):
    """pandas gives numpy arrays, and NaN for a null float."""
    if value is None or isinstance(value, float):
        return None
    return [None if item != item else item for item in value.tolist()]


frame = pandas.concat([pandas.read_parquet(file) for file in files])
check(
    "pandas",
    (
        (
            row.session_id,
            row.received_at.to_pydatetime(),
            plain(row.prompt_token_ids),
            plain(row.completion_token_ids),
            plain(row.completion_logprobs),
            int(row.usage["completion_tokens"]) if isinstance(row.usage, dict) else None,
        )
        for row in frame.itertuples()
    ),
)

check("polars", of_dicts(polars.read_parquet(pattern).to_dicts()))

with tempfile.TemporaryDirectory() as cache:
    # In any order: the first file's types are those of all (F08).
    for order in (files, files[::-1]):
        rows = list(datasets.load_dataset("parquet", data_files=order, split="train", cache_dir=cache))
    check("datasets", of_dicts(rows))

for option in ("", ", union_by_name = true"):
    connection = duckdb.connect()
    connection.execute("SET TimeZone = 'Pacific/Auckland'")
    rows = connection.execute(
        f"SELECT session_id, received_at, prompt_token_ids, completion_token_ids, completion_logprobs, usage.completion_tokens "
        f"FROM read_parquet('{pattern}'{option})"
    ).fetchall()
    if not option:
        check("duckdb", rows)
    assert len(rows) == 5
    lengths = connection.execute(
        f"SELECT count(*) FROM read_parquet('{pattern}'{option}) WHERE len(completion_token_ids) = usage.completion_tokens "
        f"AND len(completion_logprobs) = usage.completion_tokens"
    ).fetchone()
    assert lengths == (4,), lengths
    # Whether anything was captured is not whether it was empty (F07).
    for question, count in (("completion_token_ids IS NULL", 1), ("len(completion_token_ids) = 0", 1), ("usage.prompt_tokens = 18446744073709551615", 1)):
        found = connection.execute(f"SELECT count(*) FROM read_parquet('{pattern}'{option}) WHERE {question}").fetchone()
        assert found == (count,), (question, found)


# Expert routing, as a trainer takes it: two rows from position 1, two layers, two experts.
def check_routing(library, rows):
    """`rows`: (session, bytes, start, rows, layers, layer axis, top k, type, bits)."""
    for session, data, *shape in rows:
        if session != "c":
            assert data is None and all(value is None or value != value for value in shape), (library, session, shape)
            continue
        start, count, layers, axis, top_k, dtype, bits = shape
        assert (int(start), axis, dtype) == (1, "all_hidden", "u16"), (library, shape)
        size = int(count), int(layers), int(top_k)
        ones = numpy.unpackbits(numpy.frombuffer(data, "u1"), bitorder="little")[: math.prod(size) * int(bits)]
        experts = (ones.reshape(*size, int(bits)) << numpy.arange(int(bits))).sum(-1)
        assert int(bits) == 9 and len(data) == 9, (library, bits, data)
        assert experts.tolist() == [[[254, 255], [256, 257]], [[258, 259], [260, 261]]], (library, experts)


ROUTING = ["session_id", "routing"] + [f"routing_{name}" for name in ("start", "rows", "layers", "layer_axis", "top_k", "dtype", "bits")]
check_routing("pyarrow", ([row[name] for name in ROUTING] for row in table.to_pylist()))
check_routing("pandas", ([getattr(row, name) for name in ROUTING] for row in frame.itertuples()))
check_routing("polars", ([row[name] for name in ROUTING] for row in polars.read_parquet(pattern).to_dicts()))
check_routing("duckdb", duckdb.sql(f"SELECT {', '.join(ROUTING)} FROM read_parquet('{pattern}')").fetchall())
