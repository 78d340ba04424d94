"""Drafts that a grammar forces: the host names what must be said, the device finds out how much of it has been.

    main    | ... [apply_grammar n][sample, verify n][post_update n][draft n: the method's, then the grammar's] ...
    grammar | [upload n: masks and chains]                                                      [draft_copy n]

The history decides: `draft_from_chains` drafts only where the request has said what the chain expected.
"""

from __future__ import annotations

import torch

from mrv2.config import Knobs
from mrv2.device import Device
from mrv2.instrument import stages
from mrv2.runner.grammar_masks import GrammarMasks
from mrv2.runner.protocol import GrammarMask, SchedulerOutput
from mrv2.runner.v2.draft_mirror import DraftMirror
from mrv2.runner.v2.request_state import RequestState
from mrv2_kernels.spec.chain import draft_from_chains

Chains = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


class GrammarDrafts:
    """The draft stage of what grammars force, and the copy of all drafts that masks are made for."""

    def __init__(self, device: Device, state: RequestState, masks: GrammarMasks) -> None:
        self.main, self.state, self.masks = device.main, state, masks
        self.mirror = DraftMirror(device, state.draft_tokens)

    def submit(
        self,
        knobs: Knobs,
        grammar: GrammarMask,
        scheduled: SchedulerOutput,
        # [B] int32
        idx_mapping: torch.Tensor,
    ) -> None:
        """Submit what the step's chains bring, behind the method's own drafts, and the copy if there are any drafts."""
        others_draft = scheduled.num_next_drafts > 0
        if grammar.chains is not None:
            chains = self.masks.chains_on_device(len(grammar.chains.batch_rows))
            self.main.run(stages.DRAFT, _draft, self.state, chains, idx_mapping, knobs.num_spec_tokens, others_draft)
            self.masks.chains_read()
        if others_draft or grammar.chains is not None:
            self.mirror.submit()


# Device code: reads nothing but its arguments.


def _draft(
    state: RequestState,
    chains: Chains,
    # [B] int32
    idx_mapping: torch.Tensor,
    num_draft_tokens: int,
    keep_others: bool,
) -> None:
    draft_from_chains(
        state.draft_tokens,
        *chains,
        idx_mapping,
        state.arena["token_ids"],
        state.arena["total_len"],
        num_draft_tokens=num_draft_tokens,
        keep_others=keep_others,
    )
