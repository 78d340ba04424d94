from typing import Any, TypeAlias

constexpr: TypeAlias = Any

def __getattr__(name: str) -> Any: ...
