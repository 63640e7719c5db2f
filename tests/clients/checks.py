"""What must hold after a client's run: files and traces, records, histories, faults, and what the token-in relay adds.
Each check tells what does not hold to `say`."""

import json

import conversation
import upstream as scripted

MADE = {f"made_by_turn{turn}.txt": f"made by turn {turn}\n" for turn in (1, 2)}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def check_work(work, expected, say):
    """Files and traces. `expected`: how many commands must have run."""
    for turn in (1, 2):
        name = f"made_by_turn{turn}.txt"
        made, trace = work / name, work / f"trace{turn}.txt"
        lines = trace.read_text() if trace.exists() else ""
        if turn <= expected:
            if not made.exists():
                say(f"{name} was not made")
            elif made.read_text() != MADE[name]:
                say(f"{name} has {made.read_text()!r}")
            if lines != "begin\nend\n":
                say(f"the command of turn {turn} left the trace {lines!r}: not once and whole")
        elif lines or made.exists():
            say(f"a command of turn {turn} ran, in whole or in part: trace {lines!r}")
    half = sorted(path.name for path in work.iterdir() if path.name not in expected_names(expected))
    if half:
        say(f"unexpected files: {half}")


def expected_names(expected):
    turns = range(1, expected + 1)
    return {".git", *(f"made_by_turn{turn}.txt" for turn in turns), *(f"trace{turn}.txt" for turn in turns)}


def entry_of(record, entries):
    """The upstream's request that a record is of."""
    text = json.dumps(record.get("response"))
    for entry in entries:
        # "chatcmpl-…" ends so, too.
        if f"cmpl-{entry.get('reply_id')}" in text or f"(request {entry['number']})" in text:
            return entry
    for entry in entries:
        if f"(request {entry['number']})" in (record.get("error") or ""):
            return entry
    # A body that broke off was never read: its record says what was sent.
    sent = record.get("upstream_request") or record.get("client_request")
    return next((entry for entry in entries if entry.get("body") == sent and not entry.get("taken")), None)


def status_of(entry):
    """(status, http_status) that the record of a request must have."""
    fault = entry.get("fault")
    if fault in scripted.CUTS:
        # A whole reply that breaks off is answered with an error of lego's own.
        return "truncated", 200 if entry["stream"] else 502
    if fault in ("500_once", "429_once") or entry.get("status") != 200:
        return "upstream_error", entry["status"]
    return "ok", 200


APIS = {"chat": "openai_chat", "messages": "anthropic_messages", "responses": "openai_responses"}


def check_record(record, entry, wire, say):
    """One record against what the upstream was asked and answered."""
    name = f"request {entry['number']}"
    if record["kind"] == "probe":
        if record["trainable"] or entry.get("turn"):
            say(f"{name}: a probe, but it could be trained on")
        return
    if record["client_api"] != APIS[wire.partition("-")[0]]:
        say(f"{name}: the record says that the client spoke {record['client_api']}")
    status, http_status = status_of(entry)
    if (record["status"], record["http_status"]) != (status, http_status):
        got = f"{record['status']} {record['http_status']}"
        say(f"{name}: the record says {got}, not {status} {http_status}: {record.get('error')}")
        return
    if status == "upstream_error":
        return
    if status == "truncated" and not entry["stream"]:
        return
    if record["prompt_token_ids"] != entry["prompt"]:
        say(f"{name}: the record has other prompt ids")
    ids, logprobs = record["completion_token_ids"] or [], record["completion_logprobs"] or []
    sent = entry["sent"] if entry["stream"] else entry["sampled"]
    if ids != sent:
        say(f"{name}: the record has {len(ids)} completion ids, other than the {len(sent)} that were sent")
    if logprobs != [conversation.logprob_of(number) for number in ids]:
        say(f"{name}: the record has other log-probs")
    if status == "truncated":
        if record["trainable"]:
            say(f"{name}: a broken reply is trainable")
    elif not record["trainable"] and entry.get("turn"):
        say(f"{name}: not trainable: {record['not_trainable_reasons']}")


def check_records(records, entries, wire, session, say):
    """Each call has its one record, in the session that the key names."""
    if len(records) != len(entries):
        say(f"{len(records)} records of {len(entries)} calls")
    for record in records:
        entry = entry_of(record, entries)
        if entry is None or entry.get("taken"):
            say(f"record {record['call_id']} ({record['status']}: {record.get('error')}) is of no call")
            continue
        entry["taken"], entry["record"] = True, record
        check_record(record, entry, wire, say)
    sessions = sorted({record["session_id"] for record in records})
    if sessions != [session]:
        say(f"the records are in sessions {sessions}")


def turns_of(entries):
    """The request that each turn of the conversation was answered by: a repeated one supersedes those before."""
    turns = [entry for entry in entries if entry.get("turn") and entry.get("status") == 200]
    return {entry["turn"]: entry for entry in turns if entry["fault"] not in scripted.CUTS}


def first_difference(whole, prompt, decode):
    """Where a prompt leaves the ids that it should extend, in words."""
    same = next(
        (i for i, pair in enumerate(zip(whole, prompt, strict=False)) if pair[0] != pair[1]),
        min(len(whole), len(prompt)),
    )
    sampled, sent = (decode(ids[max(0, same - 4) : same + 24]) for ids in (whole, prompt))
    return f"at token {same} of {len(whole)}: {sampled!r} became {sent!r}"


def breaks_of(entries, decode):
    """What each of the turns 2 and 3 does: (notes on those that extend the one before, on those that do not)."""
    last, notes, broken = turns_of(entries), [], []
    for turn in (2, 3):
        if turn not in last or turn - 1 not in last:
            continue
        before, after = last[turn - 1], last[turn]
        whole = before["prompt"] + before["sampled"]
        if after["prompt"][: len(whole)] == whole:
            notes.append(f"{turn} extends {turn - 1}")
        else:
            broken.append(f"{turn} does not extend {turn - 1}: {first_difference(whole, after['prompt'], decode)}")
    return notes, broken


def check_history(why, is_by_fault, entries, say):
    """Whether each turn extends the one before, or what is known of why not. Returns what to tell about it. After a
    fault it may or may not, as it depends on how far the client had come."""
    notes, broken = breaks_of(entries, conversation.decode)
    if broken and not why:
        for difference in broken:
            say(f"turn {difference}")
    elif broken:
        notes += [f"{why}:", *broken]
    elif why and len(notes) == 2 and not is_by_fault:
        say(f"each turn extends the last, though the table says: {why}")
    return notes


def check_lineages(rows, breaks, fault, entries, say):
    """`lego capture lineages` finds the task's turns in one lineage, and one more for each break, with its reason.
    After a fault the first of them may say what it was before."""
    records = [entry["record"] for entry in entries if entry.get("turn") and "record" in entry]
    told = {record["call_id"] for record in records if record["status"] == "ok"}
    task = [row for row in rows if row["last_call_id"] in told]
    calls = sum(row["calls"] for row in task)
    found = [row["break"]["reason"] for row in task if row["break"]]
    if calls != len(told):
        say(f"{calls} of the task's {len(told)} calls are in its lineages: {rows}")
    if fault != "none":
        if len(task) > 1 + len(breaks):
            say(f"{len(task)} lineages of the task, with breaks {found}, not {breaks}")
    elif len(task) != 1 + len(breaks) or found != breaks:
        say(f"{len(task)} lineages of the task, with breaks {found}, not {breaks}")


def check_fault(fault, entries, say):
    """The fault struck, once, and was waited out."""
    struck = [entry for entry in entries if entry.get("fault") not in (None, "none")]
    if len(struck) != (fault != "none"):
        say(f"{len(struck)} faults struck")
    if fault == "429_once" and struck:
        later = [entry["at"] for entry in entries if entry["number"] > struck[0]["number"] and entry.get("turn")]
        waited = min(later, default=float("inf")) - struck[0]["at"]
        if waited < scripted.RETRY_AFTER_SECS:
            say(f"called again {waited:.1f} s after a 429 that said Retry-After: {scripted.RETRY_AFTER_SECS}")


# ---------------------------------------------------------------------------------------------------------------------
# Through the token-in relay


def check_breaks(expected, why, is_by_fault, entries, vocabulary, say):
    """As many turns begin anew as the table says; after a fault fewer will do, as it depends on how far the client had
    come. Returns what to tell about it."""
    notes, broken = breaks_of(entries, vocabulary.decode)
    if len(broken) == expected or is_by_fault and len(broken) < expected:
        return notes + ([f"{why}:", *broken] if broken else [])
    say(f"{len(broken)} turns begin anew, not {expected}" + (f" ({why})" if why else ""))
    for difference in broken:
        say(f"turn {difference}")
    return notes


def check_prompts(prompts, entries, in_chat, say):
    """Every call was counted with what its prompt is, and none was asked in chat's words but where the table says why
    (`in_chat`). Returns what to tell about it."""
    asked_for = [entry for entry in entries if (entry.get("record") or {}).get("kind") != "probe"]
    asked = {path: sum(1 for entry in asked_for if entry["path"] == path) for path in (CHAT, COMPLETIONS)}
    if sum(prompts.values()) != len(asked_for) or prompts.get("in_chat", 0) != asked[CHAT]:
        say(f"{prompts} was counted of {asked}")
    if bool(asked[CHAT]) != bool(in_chat):
        told = f", though the table says: {in_chat}" if in_chat else ""
        say(f"{asked[CHAT]} calls were asked in chat's words{told}")
    extended = sum(1 for entry in entries if (entry.get("record") or {}).get("parent_call_id"))
    if extended != prompts.get("extended", 0):
        say(f"{extended} records have a parent, {prompts.get('extended', 0)} prompts extend one")
    return ["prompts: " + ", ".join(f"{count} {prompt}" for prompt, count in sorted(prompts.items()))]


def check_said(entries, say):
    """What the record says that the model said is what it said, argument byte by argument byte."""
    for entry in entries:
        record = entry.get("record")
        if entry["path"] != COMPLETIONS or not record or record["status"] != "ok":
            continue
        calls = [[call["name"], call["arguments"]] for call in record["tool_calls"] or []]
        got = {"text": record["text"], "calls": calls}
        if got != entry["said"]:
            say(f"request {entry['number']}: the record says {got}, not {entry['said']}")


def check_read(entries, wire, say):
    """What stands in the prompt is what the client said, message by message (Chat alone has its words)."""
    if not wire.startswith("chat"):
        return
    for entry in entries:
        record = entry.get("record")
        if entry["path"] != COMPLETIONS or not record:
            continue
        said = [message for message in record["client_request"]["messages"] if message["role"] != "assistant"]
        said = [[plain_role(message["role"]), joined(message["content"])] for message in said]
        read = [[message["role"], message["content"]] for message in entry["read"] if message["role"] != "assistant"]
        if said != read:
            different = next((pair for pair in zip(said, read, strict=False) if pair[0] != pair[1]), (said, read))
            say(f"request {entry['number']}: the client said {different[0]}, the prompt says {different[1]}")


def plain_role(role):
    return "system" if role == "developer" else role


def joined(content):
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def check_parents(entries, say):
    """A record names the call that its prompt extends: of those that ended well before it, the one with the longest
    prompt and completion."""
    ended = []
    for entry in entries:
        if entry["path"] != COMPLETIONS or "record" not in entry:
            continue
        extended = [whole for whole, _ in ended if entry["prompt"][: len(whole)] == whole]
        longest = max(extended, key=len, default=None)
        parents = [call_id for whole, call_id in ended if whole == longest] or [None]
        if entry["record"]["parent_call_id"] not in parents:
            say(f"request {entry['number']}: its parent is {entry['record']['parent_call_id']}, not {parents[-1]}")
        if status_of(entry)[0] == "ok":
            ended.append((entry["prompt"] + entry["sampled"], entry["record"]["call_id"]))
