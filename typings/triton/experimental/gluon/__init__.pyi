# For pyright only.  A Gluon kernel is Python in form alone, as a Triton kernel is.
from typing import Any

def __getattr__(name: str) -> Any: ...
