"""Runs the view of docs/captures.md over a capture folder and compares what it gives with what was captured.

Usage: history_view.py DOCS FOLDER EXPECTED
EXPECTED has a JSON object a call: call_id, choice_index, prompt_token_ids, client_request, upstream_request, response.
"""

import json
import re
import sys

import duckdb

docs, folder, expected = sys.argv[1:]
(sql,) = re.findall(r"```sql\n(CREATE OR REPLACE MACRO.*?)```", open(docs, encoding="utf-8").read(), re.S)
duckdb.sql(sql.replace("'captures/", f"'{folder}/"))
columns = ["call_id", "choice_index", "prompt_token_ids", "client_request", "upstream_request", "response"]
rows = duckdb.sql(f"SELECT {', '.join(columns)} FROM calls ORDER BY call_id, choice_index").fetchall()
wanted = [json.loads(line) for line in open(expected, encoding="utf-8")]
wanted.sort(key=lambda call: (call["call_id"], call["choice_index"]))
assert len(rows) == len(wanted), (len(rows), len(wanted))
for row, call in zip(rows, wanted, strict=True):
    for name, value in zip(columns, row, strict=True):
        assert value == call[name], (call["call_id"], name, str(value)[:400], str(call[name])[:400])
stored = f"read_parquet('{folder}/date=*/*.parquet', union_by_name = true)"
left_out = "base_len, client_request_splice, upstream_request_splice, response_splice".split(", ")
counts = duckdb.sql(f"SELECT {', '.join(f'count({name})' for name in left_out)} FROM {stored}").fetchall()[0]
assert all(counts), counts
print(len(rows))
