"""The commands that serve requests, on a tiny model of random weights."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mrv2.bench import serving
from mrv2.bench.record import read_record
from mrv2.bench.serving import ServedRun, StepProfile
from mrv2.cli import main
from mrv2.commands.demo_prompts import DEMO_CONVERSATIONS

TINY = ["--model", "tiny-llama", "--device", "host"]
SMALL = [*TINY, "--max-model-len", "64", "--num-gpu-blocks", "40", "--max-num-seqs", "4"]
SMALL += ["--max-num-batched-tokens", "64"]
COMPARE = ["compare", *TINY, "--requests", "3", "--max-tokens", "6"]


def test_generate_token_ids(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["generate", *SMALL, "--token-ids", "1,2,3", "4 5", "--max-tokens", "5", "--temperature", "0", "--json"]
    assert main([*argv, "--ignore-eos"]) == 0
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [a["num_prompt_tokens"] for a in answers] == [3, 2]
    assert all(len(a["token_ids"]) == 5 and a["finish_reason"] == "length" for a in answers)
    # another runner, the same tokens
    assert main([*argv, "--ignore-eos", "--runner", "v1", "--no-async-scheduling"]) == 0
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == answers


def test_generate_reads_standard_input_and_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["generate", *SMALL, "--token-ids", "--max-tokens", "3", "--temperature", "0", "--ignore-eos"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("7 8 9\n"))
    assert main(argv) == 0
    from_stdin = capsys.readouterr().out.splitlines()
    assert len(from_stdin) == 1 and len(from_stdin[0].split()) == 3
    file = tmp_path / "prompts.txt"
    file.write_text("7 8 9\n\n1 2\n", encoding="utf-8")
    assert main([*argv, "--file", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "--- 7 8 9" and lines[2] == "--- 1 2"
    assert lines[1] == from_stdin[0]


def test_text_needs_a_tokenizer(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", *SMALL, "hello"]) == 1
    assert main(["chat", *SMALL]) == 1
    assert "tokenizer" in capsys.readouterr().err


def test_compare_agrees(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(COMPARE) == 0
    out, err = capsys.readouterr()
    table = [line.split()[:2] for line in out.splitlines() if line.startswith(("v1", "v2"))]
    plain = [["v1", "sync"], ["v1", "async"], ["v2", "sync"], ["v2", "async"]]
    assert table == [*plain, ["v2", "async"]]
    assert "+ ngram" in out and "ngram drafts: " in out
    assert "identical tokens: yes" in out
    assert "output 1.00" in out
    assert out.count("[0] ") == 1, "each text is printed once"
    assert "warm-up" in err


def test_compare_reports_the_first_difference(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One run's answer to request 1 is falsified."""
    profile, calls = serving.profile, []

    def falsified(core: Any, requests: Any) -> tuple[StepProfile, ServedRun]:
        recorded, run = profile(core, requests)
        calls.append(run)
        if len(calls) == 4:
            tokens = {req_id: list(ids) for req_id, ids in run.tokens.items()}
            tokens["1"][2] = (tokens["1"][2] + 1) % core.executor.vocab_size
            run = replace(run, tokens=tokens)
        return recorded, run

    monkeypatch.setattr(serving, "profile", falsified)
    assert main(COMPARE) == 1
    out = capsys.readouterr().out
    assert "identical tokens: no, 1 answer(s) differ from the first run's (v1 sync)" in out
    assert "v2 async, request 1, generated token 2" in out
    assert "not a tie" in out


def test_demo_conversations_are_well_formed() -> None:
    assert len(DEMO_CONVERSATIONS) == 8
    for conversation in DEMO_CONVERSATIONS:
        assert conversation[-1]["role"] == "user"
        assert all(
            message["role"] in ("system", "user", "assistant") and message["content"] for message in conversation
        )


def test_bench_records_and_prints_json_last(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "record.json"
    argv = ["bench", *TINY, "--workload", "a,c", "--scale", "64", "--repetitions", "1", "--stages"]
    argv += ["--modes", "async", "--runners", "v2", "--vary", "output_copy=side_stream,main_stream"]
    assert main([*argv, "--record", str(path)]) == 0
    out = capsys.readouterr().out
    line = json.loads(out.splitlines()[-1])
    assert set(line["workloads"]) == {"a/64", "c/64"}
    record = read_record(path)
    assert [w["name"] for w in record["workloads"]] == ["a/64", "c/64"]
    labels = [v["label"] for v in record["workloads"][0]["variants"]]
    assert labels == ["v2 async output_copy=side_stream", "v2 async output_copy=main_stream"]
    assert record["limits"]["read_bytes_per_s"] > 0
    assert "workload a/64" in out and "of floor" in out and "forward" in out


def test_bench_lists_its_workloads(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--list"]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert names == [*"abcdef", "d-t1", "d-k50", "f-t1", "f-k50"]


@pytest.mark.gpu
def test_compare_and_bench_on_cuda(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "--model", "tiny-llama", "--device", "cuda", "--max-tokens", "8"]) == 0
    assert "identical tokens: yes" in capsys.readouterr().out
    path = tmp_path / "record.json"
    argv = ["bench", "--model", "tiny-qwen3", "--device", "cuda", "--max-num-seqs", "8", "--max-model-len", "256"]
    assert main([*argv, "--scale", "8", "--repetitions", "1", "--record", str(path)]) == 0
    capsys.readouterr()
    record = read_record(path)
    variants = {v["label"]: v for v in record["workloads"][0]["variants"]}
    assert len(variants) == 8
    assert variants["v2 async graphs=model"]["num_graph_replays"] > 0
    assert variants["v2 async graphs=off"]["num_graph_replays"] == 0
    assert record["environment"]["gpu"]["num_sms"] > 0
    assert record["kernels"]["decode_attention_plans"]
