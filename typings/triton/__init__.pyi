# For pyright only.  A kernel is Python in form alone: Triton compiles it, passes plain numbers for
# tl.constexpr parameters and takes launch options that the function does not declare.
from typing import Any

def __getattr__(name: str) -> Any: ...
