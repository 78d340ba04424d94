"""The backup of a request: everything its batch row holds, for the day when the row is taken away."""

from __future__ import annotations

from dataclasses import dataclass, field

from mrv2.runner.protocol import NewRequest, RowSampling

# stands for a token that the device has sampled and the host has not seen
PLACEHOLDER = -1


@dataclass(slots=True, eq=False)
class CachedRequestState:
    """One request as the host knows it; it outlives the request's stays in the persistent batch."""

    req_id: str
    prompt_token_ids: list[int]
    # `PLACEHOLDER` where the output copy has not arrived
    output_token_ids: list[int]
    sampling: RowSampling
    num_computed_tokens: int
    # G lists of physical block ids
    block_ids: tuple[list[int], ...]
    # for its next step; async mode leaves them on the device
    draft_token_ids: list[int] = field(default_factory=list)
    # of the last output tokens, those that stand for a step each
    num_placeholders: int = 0

    @classmethod
    def of(cls, request: NewRequest) -> CachedRequestState:
        """Return the state of a request that arrives with its known tokens and blocks."""
        token_ids = request.token_ids.tolist()
        return cls(
            req_id=request.req_id,
            prompt_token_ids=token_ids[: request.prompt_len],
            output_token_ids=token_ids[request.prompt_len :],
            sampling=request.sampling,
            num_computed_tokens=request.num_computed_tokens,
            block_ids=tuple(list(group) for group in request.block_ids),
        )

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens, placeholders included."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)
