"""Reads files of all versions of the schema together.

Usage: read_versions.py FOLDER NEWEST
The folder holds a call of today's version and the fixture of each version up to NEWEST.
"""

import sys

import duckdb

folder, newest = sys.argv[1], int(sys.argv[2])
rows = duckdb.sql(
    f"SELECT call_id, schema_version, len(prompt_token_ids), usage.completion_tokens "
    f"FROM read_parquet('{folder}/date=*/*.parquet', union_by_name = true) ORDER BY schema_version, call_id"
).fetchall()
assert len(rows) == 1 + 3 * newest, rows
for version in range(1, newest + 1):
    of_version = [row for row in rows if row[1] == version and row[0].startswith("01a22d7c-0f5f-76dd-af34-0c2dea2d11f")]
    assert [row[2:] for row in of_version] == [(3, 2), (None, None), (1, 0)], of_version
print("read")
