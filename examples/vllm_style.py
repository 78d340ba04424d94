"""One script for two engines: the calls of vLLM's offline API that this engine shares.

    python examples/vllm_style.py [MODEL_FOLDER]

Runs under both with only the import line changed: ``from mrv2 import ...`` or ``from vllm import ...``.
Without an argument the model is one that only mrv2 can fetch by name; vLLM needs a model folder.
"""

from __future__ import annotations

import sys

from mrv2 import LLM, SamplingParams


def main(model: str) -> None:
    """Load a model and show completion, sampling, stops, log-probabilities, token prompts and chat."""
    llm = LLM(
        model=model,
        dtype="auto",
        seed=0,
        max_model_len=512,
        max_num_seqs=16,
        max_num_batched_tokens=512,
        gpu_memory_utilization=0.5,
        enable_prefix_caching=True,
        enforce_eager=True,
        tensor_parallel_size=1,
    )

    prompts = ["The capital of France is", "def fibonacci(n):", "Once upon a time"]
    greedy = SamplingParams(temperature=0.0, max_tokens=12)
    for output in llm.generate(prompts, greedy):
        print(f"{output.prompt!r} -> {output.outputs[0].text!r} [{output.outputs[0].finish_reason}]")

    varied = SamplingParams(n=3, temperature=0.9, top_p=0.95, top_k=50, min_p=0.02, seed=7, max_tokens=12)
    (story,) = llm.generate(prompts[2], varied, use_tqdm=False)
    for completion in story.outputs:
        print(f"sample {completion.index}: {completion.text!r}")

    each = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (2, 4, 8)]
    lengths = [len(output.outputs[0].token_ids) for output in llm.generate(prompts, each, use_tqdm=False)]
    print(f"one SamplingParams each: {lengths} tokens")

    stopping = SamplingParams(temperature=0.0, max_tokens=64, stop=["\n", "."], include_stop_str_in_output=True)
    (line,) = llm.generate(prompts[0], stopping, use_tqdm=False)
    print(f"up to {line.outputs[0].stop_reason!r}: {line.outputs[0].text!r}")

    scored = SamplingParams(temperature=0.0, max_tokens=3, logprobs=2)
    (output,) = llm.generate({"prompt_token_ids": story.prompt_token_ids}, scored, use_tqdm=False)
    for token_id, row in zip(output.outputs[0].token_ids, output.outputs[0].logprobs or [], strict=True):
        ranked = ", ".join(f"{entry.decoded_token!r} {entry.logprob:.2f}" for entry in row.values())
        print(f"token {token_id}: {ranked}")

    # a dialogue: every turn finds the earlier ones in the prefix cache
    dialogue = [{"role": "system", "content": "You answer in one short sentence, always politely and in plain words."}]
    for question in ("What is the capital of France?", "Name a river there.", "And one mountain?"):
        dialogue.append({"role": "user", "content": question})
        (answer,) = llm.chat(dialogue, SamplingParams(temperature=0.0, max_tokens=32), use_tqdm=False)
        dialogue.append({"role": "assistant", "content": answer.outputs[0].text})
        print(f"{question} -> {answer.outputs[0].text!r} ({answer.num_cached_tokens} prompt tokens cached)")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m-instruct")
