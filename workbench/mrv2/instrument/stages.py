"""The names of the parts of a step; the same in NVTX, the recorder, the timeline and the docs."""

from __future__ import annotations

# host, engine loop
SCHEDULE = "schedule"
EXECUTE_MODEL = "execute_model"
# inside execute_model, with input_prep="host"
BUILD_INPUTS = "build_inputs"
FILL_GRAMMAR_MASK = "fill_grammar_mask"
WAIT_GRAMMAR = "wait_grammar"
SAMPLE_TOKENS = "sample_tokens"
WAIT_OUTPUT = "wait_output"
UPDATE_FROM_OUTPUT = "update_from_output"
PROCESS_OUTPUTS = "process_outputs"
# graphs that a changed knob asks for, a few between two steps
CAPTURE_GRAPHS = "capture_graphs"

# device, in the order of a V2 step
UPLOAD = "upload"
STAGED_WRITES = "staged_writes"
GATHER_BLOCK_TABLES = "gather_block_tables"
PREPARE_INPUTS = "prepare_inputs"
# upload (staged writes are part of it) to post_update of a decode batch, in one graph; what happens inside is not
# collected
STEP_GRAPH = "step_graph"
FORWARD = "forward"
LOGITS = "logits"
GRAMMAR_UPLOAD = "grammar_upload"
APPLY_GRAMMAR = "apply_grammar"
SAMPLE = "sample"
PROMPT_LOGPROBS = "prompt_logprobs"
OUTPUT_COPY = "output_copy"
POST_UPDATE = "post_update"
VERIFY = "verify"
DRAFT = "draft"
DRAFT_COPY = "draft_copy"

# host, inside the V1 runner (its own scopes, for like-for-like timelines)
V1_PREPROCESS = "v1: preprocess"
V1_FORWARD = "v1: forward"
V1_POSTPROCESS = "v1: postprocess"
V1_SAMPLE = "v1: sample"
V1_BOOKKEEP = "v1: bookkeep"
V1_PARSE_OUTPUT = "v1: parse_output"
V1_PROPOSE = "v1: propose_drafts"
V1_PREPARE_DRAFT = "v1: prepare_draft_inputs"
V1_SCATTER_TOKENS = "v1: scatter_sampled_tokens"

# kinds, the NVTX category of a range
HOST_STAGES = frozenset(
    {
        SCHEDULE,
        EXECUTE_MODEL,
        BUILD_INPUTS,
        FILL_GRAMMAR_MASK,
        WAIT_GRAMMAR,
        SAMPLE_TOKENS,
        WAIT_OUTPUT,
        UPDATE_FROM_OUTPUT,
        PROCESS_OUTPUTS,
        CAPTURE_GRAPHS,
    }
)
