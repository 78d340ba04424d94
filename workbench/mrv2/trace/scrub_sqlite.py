"""Scrubbing an Nsight Systems export: a new file that holds what is known to be needed, and nothing else."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import quote

from mrv2.trace import redact as rd
from mrv2.trace.damage import reading
from mrv2.trace.readers.sqlite_source import SqliteSource, export_info, quote_name

# tables copied, by exact name or by prefix; all others lose their rows
_KEPT = frozenset(
    {
        "StringIds",
        "NVTX_EVENTS",
        "OSRT_API",
        "PROFILER_OVERHEAD",
        "PROCESSES",
        "ThreadNames",
        "ANALYSIS_DETAILS",
        "DIAGNOSTIC_EVENT",
        "TARGET_INFO_SESSION_START_TIME",
        "TARGET_INFO_GPU",
        "TARGET_INFO_CUDA_DEVICE",
        "TARGET_INFO_CUDA_CONTEXT_INFO",
        "TARGET_INFO_CUDA_STREAM",
        "CUDA_GRAPH_EVENTS",
        "CUDA_GRAPH_NODE_EVENTS",
        "CUDA_CALLCHAINS",
        "CUDA_HOST_CALLBACK",
        "META_DATA_EXPORT",
        "META_DATA_CAPTURE",
    }
)
_KEPT_PREFIXES = ("CUPTI_ACTIVITY_KIND_", "ENUM_", "NVTX_PAYLOAD_SCHEMA")
_EXPORT_KEYS = (
    "EXPORT_PRODUCT_NAME",
    "EXPORT_PRODUCT_VERSION",
    "EXPORT_PRODUCT_DATE",
    "EXPORT_SCHEMA_VERSION",
    "EXPORT_SCHEMA_VERSION_MAJOR",
    "EXPORT_SCHEMA_VERSION_MINOR",
    "EXPORT_SCHEMA_VERSION_MICRO",
    "EXPORT_SCHEMA_VERSION_CKSUM",
    "EXPORT_PLATFORM",
    "EXPORT_ARCH",
    "EXPORT_PARAM_LAZY",
    "EXPORT_PARAM_TIME_NORMALIZE",
    "EXPORT_PARAM_TIME_SHIFT",
)
_CAPTURE_KEYS = ("CAPTURE_EVENT_TYPE", "OS_RUNTIME_OPTIONS:%", "CUDA_OPTIONS:%", "PROCESS_%:COLLECT_%", "MRV2:%")
# columns emptied wherever they occur: they name a machine, or hold bytes that nobody can check
_CLEARED = frozenset({"uuid", "busLocation", "ctxswDevPath", "ctrlDevPath", "binaryData", "originalIP", "module"})
# columns that hold ids of StringIds
_STRING_KEYS = frozenset(
    {
        "textId",
        "jsonTextId",
        "nameId",
        "demangledName",
        "shortName",
        "mangledName",
        "symbol",
        "schemaNameId",
        "tmaSizesId",
    }
)


def scrub_sqlite(plain: Path, clean: Path, source: Path, names: list[str]) -> tuple[list[str], list[str]]:
    """Write a scrubbed copy of the unpacked export `plain` to `clean`; `source` is the name for messages.

    Returns:
        What was done, and the names of hosts and users that must not be found in the copy.

    Raises:
        TraceError: not an export of Nsight Systems, or damaged.
    """
    connect = closing(sqlite3.connect(_uri(clean), uri=True, isolation_level=None))
    with reading(source, "SQLite file"), connect as db:
        db.execute("PRAGMA journal_mode = OFF")
        db.execute("PRAGMA secure_delete = ON")
        db.execute("ATTACH ? AS source", (_uri(plain, "mode=ro&immutable=1"),))
        with _opened(plain) as reader:
            info = export_info(reader, source)
            names = rd.telling([*names, info.get("EXPORT_HOST"), info.get("EXPORT_USER"), *_hosts(reader)])
        db.execute("BEGIN")
        done = _copy(db)
        _redact_all(db, names)
        db.execute("COMMIT")
        db.execute("DETACH source")
        db.execute("VACUUM")
    return done, names


def _uri(path: Path, options: str = "") -> str:
    return f"file:{quote(str(path.resolve()))}" + (f"?{options}" if options else "")


@contextmanager
def _opened(plain: Path) -> Iterator[SqliteSource]:
    with closing(sqlite3.connect(_uri(plain, "mode=ro&immutable=1"), uri=True)) as connection:
        yield SqliteSource(connection)


def _hosts(reader: SqliteSource) -> list[str]:
    """Return host names that the profiler noted about the machine."""
    rows = reader.rows("TARGET_INFO_SYSTEM_ENV", ["name", "value"])
    return [value for name, value in rows if value and "host" in str(name).lower()]


def _is_kept(table: str) -> bool:
    return table in _KEPT or table.startswith(_KEPT_PREFIXES)


def _columns(db: sqlite3.Connection, table: str) -> list[str]:
    return [row[1] for row in db.execute(f"PRAGMA main.table_info({quote_name(table)})")]


def _copy(db: sqlite3.Connection) -> list[str]:
    """Create every table of the source, and fill those that are kept; returns what was left out."""
    made = db.execute("SELECT name, sql FROM source.sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'")
    tables = {name: sql for name, sql in made.fetchall() if sql}
    for sql in tables.values():
        db.execute(sql)
    profiled = _profiled_processes(db, tables)
    done: list[str] = []
    for table in tables:
        rows = f"FROM source.{quote_name(table)}"
        before = db.execute(f"SELECT COUNT(*) {rows}").fetchone()[0]
        if _is_kept(table):
            columns = _columns(db, table)
            picked = ", ".join(_cleared(db, table, column) for column in columns)
            db.execute(
                f"INSERT INTO main.{quote_name(table)} SELECT {picked} {rows} WHERE {_filter(table, columns, profiled)}"
            )
        after = db.execute(f"SELECT COUNT(*) FROM main.{quote_name(table)}").fetchone()[0]
        if after < before:
            done.append(f"{table}: {before - after} of {before} rows")
    return done + _drop_unused_strings(db, list(tables))


def _profiled_processes(db: sqlite3.Connection, tables: dict[str, str]) -> list[int]:
    """Return the global process ids with CUDA, NVTX or OS events of their own."""
    found: set[int] = set()
    for table in tables:
        if table.startswith("CUPTI_") or table in ("NVTX_EVENTS", "OSRT_API"):
            for column in {"globalTid", "globalPid"} & set(_columns(db, table)):
                query = f"SELECT DISTINCT {column} & ~16777215 FROM source.{quote_name(table)} WHERE {column} NOT NULL"
                found |= {pid for (pid,) in db.execute(query)}
    return sorted(found)


def _filter(table: str, columns: list[str], profiled: list[int]) -> str:
    """Return the condition for the rows of a kept table."""
    if table == "META_DATA_EXPORT":
        return f"name IN ({', '.join(map(repr, _EXPORT_KEYS))})"
    if table == "META_DATA_CAPTURE":
        return " OR ".join(f"name LIKE '{pattern}'" for pattern in _CAPTURE_KEYS)
    for column in ("globalTid", "globalPid"):
        if column in columns:
            return f"{column} IS NULL OR ({column} & ~16777215) IN ({', '.join(map(str, profiled)) or 'NULL'})"
    return "1"


def _cleared(db: sqlite3.Connection, table: str, column: str) -> str:
    """Return the SQL for one column of the copy."""
    if column not in _CLEARED:
        return quote_name(column)
    kinds = {row[1]: (row[2].upper(), row[3]) for row in db.execute(f"PRAGMA main.table_info({quote_name(table)})")}
    kind, not_null = kinds[column]
    return "NULL" if not not_null else "0" if "INT" in kind else "''"


def _drop_unused_strings(db: sqlite3.Connection, tables: list[str]) -> list[str]:
    """Delete strings that no row refers to any more."""
    if "StringIds" not in tables:
        return []
    used = ["SELECT NULL AS id WHERE 0"]
    for table in tables:
        used += [
            f"SELECT {quote_name(column)} FROM main.{quote_name(table)} WHERE {quote_name(column)} NOT NULL"
            for column in _columns(db, table)
            if column in _STRING_KEYS
        ]
    db.execute("CREATE TEMP TABLE used (id INTEGER PRIMARY KEY)")
    for query in used:
        db.execute(f"INSERT OR IGNORE INTO used {query}")
    dropped = db.execute("DELETE FROM main.StringIds WHERE id NOT IN (SELECT id FROM used)").rowcount
    db.execute("DROP TABLE used")
    return [f"StringIds: {dropped} strings that nothing refers to"] if dropped else []


def _redact_all(db: sqlite3.Connection, names: list[str]) -> None:
    """Redact every text that is left."""
    db.create_function("redact", 1, lambda text: rd.redact(text, names), deterministic=True)
    tables = db.execute("SELECT name FROM main.sqlite_master WHERE type = 'table'").fetchall()
    for (table,) in tables:
        for column in map(quote_name, _columns(db, table)):
            db.execute(
                f"UPDATE main.{quote_name(table)} SET {column} = redact({column}) "
                f"WHERE TYPEOF({column}) = 'text' AND {column} <> redact({column})"
            )
