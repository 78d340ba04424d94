"""A tiny target, its dialogues and a tokenizer-free chat, for the tests of training."""

from __future__ import annotations

import numpy as np
import torch

from mrv2.training.dialogues import CHAT, TRAIN, Dialogue, Dialogues
from mrv2.training.heads import DraftHead, HeadShape, build_head
from mrv2.training.scripts import ChatScripts
from mrv2.training.target import FrozenTarget
from mrv2.training.trainer import TrainOptions

CPU = torch.device("cpu")
END, OTHER_END = 2, 0
SCRIPTS = ChatScripts(
    prefixes=((1, 7, 8), (1, 9, 8, 10)),
    first_words=((30, 31),),
    to_answer=(11, 12),
    to_question=(13,),
    end_ids=(END, 0),
)


def tiny_target(dtype: str = "float32") -> FrozenTarget:
    """Two layers of random weights, 512 tokens."""
    return FrozenTarget("tiny-llama", dtype=dtype, device=CPU, load_format="dummy")


def random_head(target: FrozenTarget, method: str, seed: int = 0) -> DraftHead:
    """A head whose every weight matters: the start from the target's layer plus noise."""
    torch.manual_seed(seed)
    head = build_head(method, HeadShape.of_target(target, method))
    head.start_from(target)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return head


@torch.no_grad()
def greedy_dialogues(target: FrozenTarget, num: int, *, num_chat: int, seed: int = 0, answer: int = 16) -> Dialogues:
    """Random prompts and the target's own greedy answers."""
    rng = np.random.default_rng(seed)
    dialogues = []
    for index in range(num):
        ids = rng.integers(3, 512, size=int(rng.integers(4, 9))).tolist()
        start = len(ids)
        while len(ids) < start + answer:
            hidden = target.features(torch.tensor([ids])).final[0, -1]
            ids.append(int((target.head @ hidden).argmax()))
        flags = np.arange(len(ids)) >= start
        dialogues.append(Dialogue(np.array(ids), flags, True, CHAT if index < num_chat else TRAIN))
    record = {"target": target.name, "target_sha256": None, "num_train": num - num_chat, "num_chat": num_chat}
    record |= {"num_train_answer_tokens": answer * (num - num_chat), "num_code": 0}
    return Dialogues.pack(dialogues, 512, record)


def options(method: str, **changes: object) -> TrainOptions:
    """A run of a few steps."""
    given = {"minutes": 5.0, "batch_dialogues": 8, "draft_vocab_size": 512, "unroll": 3, "warmup_steps": 5}
    return TrainOptions(method=method, **(given | changes))  # pyright: ignore[reportArgumentType]
