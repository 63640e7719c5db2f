"""Calls as blobs of JSON in SQLite, synced with each commit: what peers keep.

Usage: sqlite.py write|read DATABASE JSONL BATCH
Prints CPU seconds and the number of sampled tokens.
"""

import json
import os
import sqlite3
import sys
import time

work, database, lines, batch = sys.argv[1:]
if work == "write":
    calls = [line.rstrip("\n") for line in open(lines, encoding="utf-8")]
    started = time.process_time()
    connection = sqlite3.connect(database, isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("CREATE TABLE calls (id INTEGER PRIMARY KEY, data TEXT)")
    for at in range(0, len(calls), int(batch)):
        connection.execute("BEGIN")
        connection.executemany("INSERT INTO calls (data) VALUES (?)", [(call,) for call in calls[at : at + int(batch)]])
        connection.execute("COMMIT")
    connection.close()
    print(time.process_time() - started, 0)
else:
    started = time.process_time()
    connection = sqlite3.connect(database)
    sampled = 0
    for (data,) in connection.execute("SELECT data FROM calls"):
        call = json.loads(data)
        assert len(call["completion_token_ids"]) == len(call["completion_logprobs"])
        sampled += len(call["completion_token_ids"])
    print(time.process_time() - started, sampled)
