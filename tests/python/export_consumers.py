"""Loads exports with what their consumers load them with, and checks that it is what was captured.

Usage: export_consumers.py CONSUMER PACKAGES PATH [EXPECTED]
PACKAGES: a folder with consumers' packages, installed without what they depend on. EXPECTED: a JSON
file of the samples that are to be there: token ids, where the response starts, mask, log-probs.
Prints the name of the consumer.

torch is not installed: for those who need no more of it than a list of numbers numpy stands in (`Torch`).
"""

import ast
import base64
import importlib.util
import io
import json
import pickle
import sys
import types
import typing
import zipfile
from pathlib import Path

consumer, packages, path = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
expected = json.loads(Path(sys.argv[4]).read_text()) if len(sys.argv) > 4 else None
sys.path.append(str(packages))


def lines():
    return [json.loads(line) for line in path.read_text().splitlines()]


class Torch(types.ModuleType):
    """As much of torch as there is in the classes that are loaded here."""

    def __init__(self):
        super().__init__("torch")
        import numpy

        class Tensor(numpy.ndarray):
            def size(self, axis=None):
                return self.shape if axis is None else self.shape[axis]

            def new_zeros(self, shape):
                return numpy.zeros(shape, self.dtype).view(Tensor)

        self.Tensor, self.Size, self.dtype = Tensor, tuple, numpy.dtype
        self.int64, self.int16, self.float32 = numpy.int64, numpy.int16, numpy.float32
        self.tensor = lambda values, dtype: numpy.array(values, dtype).view(Tensor)
        self.zeros_like = lambda like, dtype: numpy.zeros(like.shape, dtype).view(Tensor)


def in_alone(name):
    """A module of a package whose parents are not run."""
    parts = name.split(".")
    for depth in range(1, len(parts)):
        parent = ".".join(parts[:depth])
        if parent not in sys.modules:
            module = types.ModuleType(parent)
            module.__path__ = [str(packages.joinpath(*parts[:depth]))]
            sys.modules[parent] = module
    spec = importlib.util.spec_from_file_location(name, packages.joinpath(*parts).with_suffix(".py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def classes_of(file, names, scope):
    """Runs the definitions of these classes of a source file, and nothing else of it."""
    tree = ast.parse(packages.joinpath(file).read_text())
    wanted = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name in names]
    assert len(wanted) == len(names), names
    exec(compile(ast.Module(wanted, []), str(file), "exec"), scope)
    return [scope[name] for name in names]


def experts(of):
    import numpy

    return numpy.frombuffer(base64.b64decode(of["data"]), of["dtype"]).reshape(of["shape"])


def without_nulls(value):
    """datasets gives members that only other rows have as null."""
    if isinstance(value, dict):
        return {name: without_nulls(one) for name, one in value.items() if one is not None}
    return [without_nulls(one) for one in value] if isinstance(value, list) else value


def check_sample(tokens, start, mask, logprobs):
    """The tokens, where the response starts, and what is aligned to it."""
    assert [[*tokens], start, [int(one) for one in mask]] in [one[:3] for one in expected], (tokens, start, mask)
    wanted = next(one for one in expected if one[0] == [*tokens])[3]
    assert len(logprobs) == len(mask) == len(tokens) - start
    for got, want in zip(logprobs, wanted, strict=True):
        assert abs(got - want) < 1e-6, (logprobs, wanted)


def trl():
    """The keys that GRPOTrainer takes of a rollout_func, from its own source; then its lists for one prompt."""
    source = ast.parse(packages.joinpath("trl/trainer/grpo_trainer.py").read_text())
    assigned = [node for node in ast.walk(source) if isinstance(node, ast.Assign)]
    names = {node.targets[0].id: node.value for node in assigned if isinstance(node.targets[0], ast.Name)}
    required = ast.literal_eval(names["required_keys"])
    masked = [node for node in ast.walk(source) if isinstance(node, ast.Constant) and node.value == "env_mask"]
    assert masked, "env_mask is what TRL calls the mask"
    rows = lines()
    output = {name: [row[name] for row in rows] for name in [*required, "env_mask", "reward", "episode_id", "group_id"]}
    assert required <= output.keys()
    for row in range(len(rows)):
        prompt, completion = output["prompt_ids"][row], output["completion_ids"][row]
        check_sample(prompt + completion, len(prompt), output["env_mask"][row], output["logprobs"][row])


def verl():
    """verl's own AgentLoopOutput, and what it makes of it for its trainer."""
    from pydantic import BaseModel

    torch = Torch()
    scope = {"BaseModel": BaseModel, "Any": typing.Any, "Optional": typing.Optional, "torch": torch}
    _, output_class = classes_of(
        "verl/experimental/agent_loop/agent_loop.py", ["AgentLoopMetrics", "AgentLoopOutput"], scope
    )
    keys = set()
    for row in lines():
        routed = row["output"].pop("routed_experts")
        output = output_class(**row["output"], routed_experts=None if routed is None else experts(routed))
        check_sample(
            output.prompt_ids + output.response_ids, len(output.prompt_ids), output.response_mask, output.response_logprobs
        )
        made = output.as_dict()
        assert made["rm_scores"][-1] == output.reward_score and made["rm_scores"][:-1].sum() == 0
        assert made["num_turns"] >= 2, "verl's validation asks each row for it"
        assert made["rollout_log_probs"].shape == made["response_mask"].shape == made["responses"].shape
        if routed is not None:
            assert len(made["routed_experts"]) == len(output.prompt_ids) + len(output.response_ids)
            assert (made["routed_experts"][:-1] == experts(routed)).all()
        info = made["extra_fields"]["reward_extra_info"]
        keys.add(tuple(sorted(info)))
        assert info["episode_id"] == row["episode_id"] and info["group_id"] == row["group_id"]
    assert len(keys) == 1, "verl reads the keys of one row in all of them"


class OfArchive(pickle.Unpickler):
    """What torch.load does with an archive that has no tensors; only numpy's arrays and bytes are made."""

    def find_class(self, module, name):
        assert (module, name) in {("numpy", "ndarray"), ("builtins", "bytearray")}, (module, name)
        return super().find_class(module, name)


def slime():
    """Reads the archives, and makes slime's Sample of them: that of its fork miles, which is on PyPI."""
    sys.modules["torch"] = Torch()
    sample_class = in_alone("miles.utils.types").Sample
    files = sorted(path.glob("*.pt"))
    assert [file.name for file in files] == [f"{number}.pt" for number in range(len(files))], files
    for number, file in enumerate(files):
        with zipfile.ZipFile(file) as archive:
            assert archive.testzip() is None
            assert archive.read("archive/version") == b"3\n"
            loaded = OfArchive(io.BytesIO(archive.read("archive/data.pkl"))).load()
        assert loaded["rollout_id"] == number
        for one in loaded["samples"]:
            sample = sample_class.from_dict(one)
            sample.validate()
            start = len(sample.tokens) - sample.response_length
            check_sample(sample.tokens, start, sample.loss_mask, sample.rollout_log_probs)
            routed = sample.rollout_routed_experts
            assert routed is None or (routed.dtype == "int32" and routed.flags.writeable and routed.ndim == 3)
            assert sample.remove_sample == (sum(sample.loss_mask) == 0)
            assert sample.metadata["episode_id"] and sample.metadata["group_id"]
            assert sample.status.value in {"completed", "truncated"}


def prime_rl():
    """The fields of prime-rl's MicroBatch in its order, decoded as its trainer decodes them. It is not on PyPI: the
    definition is written down here."""
    import msgspec
    import numpy

    class RoutedExperts(msgspec.Struct, array_like=True):
        data: bytes
        shape: list[int]
        dtype: str

    class MicroBatch(msgspec.Struct, array_like=True):
        input_ids: list[int]
        loss_mask: list[bool]
        advantages: list[float]
        inference_logprobs: list[float]
        position_ids: list[int]
        sequence_lengths: list[int]
        temperatures: list[float]
        env_names: list[str]
        seq_lens: list[int]
        ref_logprobs: list[float] | None = None
        routed_experts: RoutedExperts | None = None
        mm_refs: list | None = None
        mm_token_type_ids: list[int] | None = None
        rl_weights: list[float] | None = None
        ce_weights: list[float] | None = None
        ref_kl_weights: list[float] | None = None
        sampling_mask: list | None = None
        trace_ids: list[str] | None = None
        branch_indices: list[int] | None = None

    decoder = msgspec.msgpack.Decoder(list[MicroBatch])
    rows = [json.loads(line) for line in path.joinpath("rows.jsonl").read_text().splitlines()]
    named = {(row["step"], row["rank"], row["micro_batch"]): row for row in rows}
    steps = sorted(path.glob("rollouts/step_*"))
    for number in range(len(steps)):
        ranks = sorted(path.glob(f"rollouts/step_{number}/rank_*.bin"))
        batches = [decoder.decode(file.read_bytes()) for file in ranks]
        assert len({len(batch) for batch in batches}) == 1, "ranks with different numbers of micro batches wait for ever"
        for rank, batch in enumerate(batches):
            for place, one in enumerate(batch):
                length = len(one.input_ids)
                assert one.sequence_lengths == one.seq_lens == [length] and one.position_ids == [*range(length)]
                aligned = [one.loss_mask, one.advantages, one.inference_logprobs, one.temperatures, one.env_names]
                assert all(len(values) == length for values in aligned)
                assert all(value > 0 for value in one.temperatures), "logits are divided by it"
                name = named.pop((number, rank, place), None)
                if name is None:
                    assert not any(one.loss_mask) and not any(one.advantages), "a filler trains nothing"
                    continue
                assert set(one.advantages) == {name["advantage"]}
                assert one.trace_ids == [name["episode_id"]] and one.branch_indices == [name["sample_index"]]
                start = length - len(next(of[2] for of in expected if of[0] == one.input_ids))
                check_sample(one.input_ids, start, one.loss_mask[start:], one.inference_logprobs[start:])
                if one.routed_experts is not None:
                    routed = one.routed_experts
                    made = numpy.frombuffer(routed.data, routed.dtype).reshape(routed.shape)
                    assert made.shape[0] == length and not made[-1].any()
    assert not named, named


def openai():
    """Hugging Face's datasets, then TRL's own functions for conversations with a chat template."""
    import datasets
    from transformers import PreTrainedTokenizerFast

    from trl.data_utils import apply_chat_template, is_conversational

    loaded = datasets.load_dataset("json", data_files=str(path), split="train", cache_dir=str(path.parent / "cache"))
    rows = lines()
    assert len(loaded) == len(rows)
    fixtures = Path(__file__).parent.parent / "fixtures/text"
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(fixtures / "tokenizer.json"))
    tokenizer.chat_template = (fixtures / "chat_template.jinja").read_text()
    for got, row in zip(loaded, rows, strict=True):
        assert without_nulls(got["messages"]) == without_nulls(row["messages"])
        assert without_nulls(got["tools"]) == without_nulls(row["tools"]), "tools of one row get none of another's"
        assert is_conversational(row)
        text = apply_chat_template({"messages": without_nulls(row["messages"])}, tokenizer, tools=row["tools"])["text"]
        last = row["messages"][-1]
        assert last["role"] == "assistant" and (last["content"] or "") in text


def sharegpt():
    """LLaMA-Factory's converter, and its own defaults for the form."""
    constants = types.ModuleType("llamafactory.extras.constants")
    constants.RUNNING_LOG = "running_log.txt"
    sys.modules["llamafactory.extras.constants"] = constants  # It imports peft for a name.
    module = in_alone("llamafactory.data.data_utils")
    assert module.Role.USER == "user"
    converter = in_alone("llamafactory.data.converter").SharegptDatasetConverter
    tags = {"messages": "conversations", "role_tag": "from", "content_tag": "value", "user_tag": "human"}
    tags |= {"assistant_tag": "gpt", "observation_tag": "observation", "function_tag": "function_call"}
    tags |= {"system_tag": "system", "system": None, "tools": "tools", "ranking": False, "kto_tag": None}
    tags |= {"images": None, "videos": None, "audios": None, "load_from": "file"}
    for row in lines():
        made = converter(types.SimpleNamespace(**tags), None)(row)
        turns = row["conversations"]
        own = turns[1:] if turns[0]["from"] == "system" else turns
        assert len(made["_prompt"]) + len(made["_response"]) == len(own) > 0, "it takes the row as broken"
        assert made["_response"][-1]["content"] == turns[-1]["value"]
        assert made["_system"] == (turns[0]["value"] if len(own) < len(turns) else "")
        assert made["_tools"] is None or json.loads(made["_tools"])


def atif():
    """harbor's own models of the format, and an independent implementation of it."""
    import atif as independent
    from harbor.models.trajectories import Trajectory

    for row in lines():
        harbors = Trajectory.model_validate(row)
        others = independent.Trajectory.model_validate(row)
        assert harbors.model_dump(mode="json", exclude_none=True) == row
        assert others.model_dump(mode="json", exclude_none=True) == row
        for step in harbors.steps:
            if step.metrics and step.metrics.logprobs:
                assert len(step.metrics.logprobs) == len(step.metrics.completion_token_ids)


def calls():
    """pandas and polars; the routing in numpy."""
    import pandas
    import polars

    frame, rows = pandas.read_json(path, lines=True, dtype=False), lines()
    assert polars.read_ndjson(path).height == len(frame) == len(rows)
    for row in rows:
        routing = row["expert_routing"]
        if routing is not None:
            import numpy

            dtype = {"u8": "<u1", "u16": "<u2", "i32": "<i4"}[routing["dtype"]]
            shape = routing["rows"], routing["layers"], routing["top_k"]
            numpy.frombuffer(base64.b64decode(routing["data"]), dtype).reshape(shape)


globals()[consumer]()
print(consumer)
