"""Checkpoint files: written whole or not at all; a damaged one is named, not read; nothing in it ever runs."""

from __future__ import annotations

import enum
import errno
import io
import os
import pickle
import random
import resource
import stat
import subprocess
import sys
import threading
import zipfile
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from models import assert_same, train, wrapped
from torch import Tensor, nn

from mixedopt import CheckpointError, DynamicLossScale
from mixedopt.checkpoint import files
from mixedopt.checkpoint.files import LARGE, load, save
from mixedopt.copies import mapped

CORRUPTIONS = 200
KILLS = 50


def contents(folder: Path) -> dict[str, bytes]:
    """Return name -> bytes of all files, hidden ones too."""
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A file with a tensor that has its own checksum, one that has not, and plain data."""
    path = tmp_path / "run.pt"
    save(path, large=torch.arange(LARGE, dtype=torch.float32), small=torch.arange(5), step=3, names=["a", "b"])
    return path


# -- what is written is read --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mmap", [False, True], ids=["read", "mapped"])
def test_a_run_comes_back_bit_for_bit(tmp_path: Path, device: torch.device, dtype: torch.dtype, mmap: bool) -> None:
    """Model, optimizer, scheduler and numbers are those saved, and bare torch reads the same."""
    path = tmp_path / "run.pt"
    model, optimizer = wrapped(device, dtype, loss_scale=DynamicLossScale(init_scale=2.0**7, growth_interval=2))
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=20)
    for step in range(3):
        train(model, optimizer, [step])
        scheduler.step()
    plain = {"step": 3, "best": 0.1 + 0.2, "big": torch.randn(3 * LARGE), "rng": torch.get_rng_state(), "note": "é\n"}
    save(path, model=model, optimizer=optimizer, scheduler=scheduler, plain=plain)
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}

    loaded = load(path, map_location=device, mmap=mmap)
    assert list(loaded) == ["model", "optimizer", "scheduler", "plain"]
    assert_same(mapped({**states, "plain": plain}, Tensor.cpu), mapped(loaded, Tensor.cpu))  # map_location moved all
    assert_same(torch.load(path, map_location=device, weights_only=True), loaded)

    fresh, resumed = wrapped(device, dtype, loss_scale=DynamicLossScale(init_scale=2.0**7, growth_interval=2))
    fresh.load_state_dict(loaded["model"])
    resumed.load_state_dict(loaded["optimizer"])
    for run in ((model, optimizer), (fresh, resumed)):
        train(*run, [3, 4])
    assert_same(optimizer.state_dict(), resumed.state_dict())


class Colour(enum.IntEnum):
    RED = 1


class Odd(dict[str, int]):
    """Not a dict to an unpickler."""


def noted(value: Any) -> torch.Tensor:
    """Return a tensor with an attribute, which is saved with it."""
    tensor = torch.ones(2)
    tensor.note = value  # type: ignore[attr-defined]
    return tensor


READABLE: dict[str, Any] = {
    "none": None,
    "bool": True,
    "int": 10**30,
    "float": -0.0,
    "complex": 1 + 2j,
    "str": "a\ud800",
    "bytes": b"a",
    "bytearray": bytearray(b"a"),
    "dtype": torch.bfloat16,
    "device": torch.device("cpu"),
    "size": torch.Size([1]),
    "layout": torch.strided,
    "parameter": nn.Parameter(torch.ones(2)),
    "buffer": nn.Buffer(torch.ones(2)),
    "sparse": torch.ones(2, 2).to_sparse(),
    "no elements": torch.ones(0, 3),
    "float8": torch.ones(2).to(torch.float8_e4m3fn),
    "nested": {"a": [(1, {2}), OrderedDict(b=Counter("aab"))], ("t", 1): {}},
    "noted": noted("why"),
}
UNREADABLE: dict[str, Any] = {
    "fraction": Fraction(1, 2),
    "enum": Colour.RED,
    "dict type": Odd(a=1),
    "defaultdict": defaultdict(int, a=1),
    "frozenset": frozenset([1]),
    "range": range(3),
    "function": len,
    "type": nn.Linear,
    "path": Path("a"),
    "generator": torch.Generator(),
    "module": nn.Linear(1, 1),
    "lazy": nn.LazyLinear(1).weight,
    "noted": noted(Fraction(1, 2)),
}


@pytest.mark.parametrize("name", READABLE)
def test_what_weights_only_reads_is_saved(name: str, tmp_path: Path) -> None:
    """Each kind of value comes back as it was, by this library and by torch."""
    save(tmp_path / "run.pt", item=READABLE[name], again=[READABLE[name]])
    for loaded in (load(tmp_path / "run.pt"), torch.load(tmp_path / "run.pt", weights_only=True)):
        for value in (loaded["item"], loaded["again"][0]):
            assert type(READABLE[name]) is type(value)
            assert repr(READABLE[name]) == repr(value)


@pytest.mark.parametrize("name", UNREADABLE)
def test_what_weights_only_refuses_is_not_saved(name: str, saved: Path) -> None:
    """The message says where it is; the old file stays; and torch would indeed refuse it."""
    before = contents(saved.parent)
    value = UNREADABLE[name]
    with pytest.raises(TypeError, match=r"item\['a'\]\[1\].*Nothing was written\. Save "):
        save(saved, step=1, item={"a": [0, value]})
    if name in ("fraction", "enum", "path", "frozenset"):
        with pytest.raises(TypeError, match=r"item\['a key'\]\[1\] is .*Nothing was written"):
            save(saved, item={("key", value): 1})
    assert before == contents(saved.parent)
    with pytest.raises((pickle.UnpicklingError, AttributeError, TypeError)):
        _through_memory(value)


def _through_memory(value: Any) -> Any:
    file = io.BytesIO()
    torch.save({"a": value}, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_a_save_of_nothing_leaves_the_old_file(saved: Path) -> None:
    """A call without items, or with a class for its instance, is an error."""
    before = contents(saved.parent)
    with pytest.raises(TypeError, match="nothing to save"):
        save(saved)
    with pytest.raises(TypeError, match=r"model is a builtins\.type.*Nothing was written"):
        save(saved, model=nn.Linear)
    assert before == contents(saved.parent)


def test_an_item_may_have_any_name(tmp_path: Path) -> None:
    """``path`` is no name of an argument."""
    save(tmp_path / "run.pt", path=1, items=2)
    assert {"path": 1, "items": 2} == load(tmp_path / "run.pt")


def test_values_that_hold_themselves_or_are_shared_are_saved(tmp_path: Path) -> None:
    """The check ends, and what was one thing is one thing again."""
    loop: list[Any] = [torch.ones(2)]
    loop.append(loop)
    save(tmp_path / "run.pt", one=loop, other=loop)
    loaded = load(tmp_path / "run.pt")
    assert loaded["one"] is loaded["other"] is loaded["one"][1]


def test_checksums_are_written_when_torch_was_told_not_to(tmp_path: Path) -> None:
    """The setting of torch is overruled for the length of a save."""
    torch.serialization.set_crc32_options(False)
    try:
        save(tmp_path / "run.pt", weights=torch.randn(LARGE))
        assert not torch.serialization.get_crc32_options()
    finally:
        torch.serialization.set_crc32_options(True)
    load(tmp_path / "run.pt")
    assert zipfile.ZipFile(tmp_path / "run.pt").testzip() is None


# -- the file in its directory -------------------------------------------------------------------------------------


def test_a_new_file_has_the_usual_permissions_and_a_replaced_one_keeps_its_own(tmp_path: Path) -> None:
    """The umask decides first, then the user."""
    path = tmp_path / "run.pt"
    umask = os.umask(0o027)
    try:
        save(path, step=1)
        assert 0o640 == stat.S_IMODE(path.stat().st_mode)
        path.chmod(0o604)
        save(path, step=2)
    finally:
        os.umask(umask)
    assert 0o604 == stat.S_IMODE(path.stat().st_mode)
    assert {"step": 2} == load(path)


@pytest.mark.parametrize("dangling", [False, True])
def test_a_link_stays_a_link(tmp_path: Path, dangling: bool) -> None:
    """The file that a symbolic link leads to is replaced, in its own directory."""
    (tmp_path / "far").mkdir()
    link, target = tmp_path / "latest.pt", tmp_path / "far" / "run.pt"
    link.symlink_to(Path("far") / "run.pt")
    if not dangling:
        save(target, step=1)
    save(link, step=2)
    assert link.is_symlink()
    assert {"step": 2} == load(target) == load(link)
    assert ["run.pt"] == os.listdir(target.parent)


def test_only_a_regular_file_is_replaced(tmp_path: Path) -> None:
    """A pipe, like ``/dev/null``, is not overwritten by a file."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(CheckpointError, match="not a regular file"):
            save(path, step=1)
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_a_missing_file_or_directory_is_an_oserror(tmp_path: Path) -> None:
    """It has torch's class, and names the path that was given."""
    with pytest.raises(FileNotFoundError, match=r"run\.pt"):
        load(tmp_path / "run.pt")
    with pytest.raises(FileNotFoundError, match=r"was not written.*none/run\.pt"):
        save(tmp_path / "none" / "run.pt", step=1)


def test_writers_at_the_same_time_leave_one_whole_file(tmp_path: Path) -> None:
    """Each has a temporary file of its own; readers in between see whole files only."""
    path = tmp_path / "run.pt"
    save(path, **version(0))
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for _ in range(5):
                save(path, **version(number))
                check_version(load(path, mmap=number == 1), range(5))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert ["run.pt"] == os.listdir(tmp_path)


def test_a_mapped_file_outlives_its_replacement(tmp_path: Path) -> None:
    """Tensors that were mapped keep their values when a newer checkpoint takes the name."""
    save(tmp_path / "run.pt", **version(1))
    mapped = load(tmp_path / "run.pt", mmap=True)
    save(tmp_path / "run.pt", **version(2))
    check_version(mapped, [1])
    check_version(load(tmp_path / "run.pt"), [2])


# -- a save that fails ---------------------------------------------------------------------------------------------


class Faulty(io.BufferedRandom):
    """A file whose n-th call of one kind fails."""

    calls: Counter[str]
    step: tuple[str, int]
    error: BaseException

    def count(self, kind: str) -> None:
        self.calls[kind] += 1
        if (kind, self.calls[kind]) == self.step:
            raise self.error

    def write(self, data: Any) -> int:
        self.count("write")
        return super().write(data)

    def flush(self) -> None:
        self.count("flush")
        super().flush()


@contextmanager
def failing(step: tuple[str, int], error: BaseException) -> Iterator[Counter[str]]:
    """Let the n-th call of one kind fail; yield how often each was called."""
    calls: Counter[str] = Counter()
    faulty = type("Faulty", (Faulty,), {"calls": calls, "step": step, "error": error})

    def failing_open(path: str, mode: str) -> Any:
        Faulty.count(faulty, "open")  # type: ignore[arg-type]
        return faulty(io.FileIO(path, mode.replace("b", "")))

    def wrapped_call(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any) -> Any:
            Faulty.count(faulty, name)  # type: ignore[arg-type]
            return call(*args)

        return counted

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "open", failing_open, raising=False)
        for name in ("chmod", "fsync", "replace"):
            patch.setattr(os, name, wrapped_call(name, getattr(os, name)))
        yield calls


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left"), KeyboardInterrupt()], ids=["full", "Ctrl-C"])
def test_a_save_that_fails_at_any_step_leaves_the_old_file(saved: Path, error: BaseException) -> None:
    """Each call in turn fails: the old checkpoint is there to the bit, and no other file."""
    before = contents(saved.parent)
    items = {"weights": torch.randn(2 * LARGE), "step": 4}
    with failing(("", 0), error) as calls:
        save(saved.with_name("other.pt"), **items)
        save(saved.with_name("other.pt"), **items)  # over a file there is one call more
    saved.with_name("other.pt").unlink()
    assert {"open", "write", "flush", "fsync", "replace", "chmod"} == set(calls)
    once = {kind: number // 2 for kind, number in calls.items()} | {"chmod": 1, "fsync": 1}
    for step in [(kind, index + 1) for kind, number in once.items() for index in range(number)]:
        with failing(step, error), pytest.raises(type(error)) as raised:
            save(saved, **items)
        assert before == contents(saved.parent), step
        if isinstance(error, OSError):
            assert raised.value.errno == errno.ENOSPC
            assert raised.value.filename == str(saved)
            assert "what was there is as it was" in str(raised.value)


def test_a_directory_that_cannot_be_flushed_is_told(saved: Path) -> None:
    """The new file is in place by then, and the message says so."""
    with (
        failing(("fsync", 2), OSError(errno.EIO, "I/O error")),
        pytest.raises(OSError, match="new checkpoint is in pl"),
    ):
        save(saved, step=4)
    with failing(("fsync", 2), OSError(errno.EINVAL, "a file system without it")):
        save(saved, step=5)
    assert {"step": 5} == load(saved)
    assert ["run.pt"] == os.listdir(saved.parent)


def test_a_file_that_cannot_grow_leaves_the_old_file(saved: Path) -> None:
    """The system, not a stand-in, refuses in the middle of a write."""
    before = contents(saved.parent)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(OSError, match="was not written"):
            save(saved, weights=torch.zeros(1 << 20))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert before == contents(saved.parent)


def test_a_state_dict_that_raises_leaves_the_old_file(saved: Path) -> None:
    """The error of an item is its own, and comes before anything is written."""

    class Broken:
        def state_dict(self) -> dict[str, Any]:
            raise RuntimeError("not now")

    before = contents(saved.parent)
    with pytest.raises(RuntimeError, match="not now"):
        save(saved, step=1, broken=Broken())
    assert before == contents(saved.parent)


# -- a writer that is killed ---------------------------------------------------------------------------------------


def version(number: int) -> dict[str, Any]:
    """Return items that tell which version they are, in every value."""
    return {"number": number, "weights": [torch.full((LARGE * 4,), float(number + index)) for index in range(8)]}


def check_version(items: dict[str, Any], known: Any) -> None:
    """Fail unless the items are one version, and whole."""
    assert items["number"] in known
    assert_same(version(items["number"]), items)


def wait_for_a_random_moment(within: float, chance: random.Random) -> None:
    """Sleep: not to wait for anything, but because the moment of the kill is what is tested."""
    threading.Event().wait(chance.uniform(0.0, within))


def kill_writers(path: str, kills: int) -> None:
    """Kill a child that saves A, B, A, ... at random moments; after each, the file must be whole.

    Children are forked, so that they need not import torch.
    """
    import signal
    import time

    torch.set_num_threads(1)
    chance = random.Random(0)
    start = time.perf_counter()
    for number in range(4):
        save(path, **version(number % 2))
    within = (time.perf_counter() - start) / 4
    seen = set()
    for _ in range(kills):
        ready, go = os.pipe()
        child = os.fork()
        if child == 0:
            items = [version(0), version(1)]
            os.write(go, b".")
            while True:
                for item in items:
                    save(path, **item)
        os.read(ready, 1)
        wait_for_a_random_moment(2 * within, chance)
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        os.close(ready)
        os.close(go)
        assert os.WTERMSIG(status) == signal.SIGKILL, "the child ended by itself"
        items = load(path)
        check_version(items, (0, 1))
        seen.add(items["number"])
    assert seen == {0, 1}


def test_a_killed_writer_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    """SIGKILL at 50 random moments of a save: the file is always one version, complete."""
    code = f"import test_checkpoint_files as t; t.kill_writers({str(tmp_path / 'run.pt')!r}, {KILLS})"
    folders = [str(Path(__file__).parent), str(Path(files.__file__).parents[2])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr

    left = [name for name in os.listdir(tmp_path) if name != "run.pt"]
    assert left, "no kill fell into a write"
    assert all(name.startswith(".run.pt.") and name.endswith(".tmp") for name in left)


# -- a file that is damaged, or another's --------------------------------------------------------------------------


def corruptions(whole: bytes, chance: random.Random) -> Iterator[tuple[str, bytes]]:
    """Yield damaged files for ever, of each kind in turn, at random places."""
    end = len(whole)
    while True:
        at = chance.randrange(end)
        yield f"cut at {at}", whole[:at]
        for name, low, high in (("anywhere", 0, end), ("tail", end - 700, end), ("comment", end - 84, end)):
            at, bit = chance.randrange(low, high), chance.randrange(8)
            yield f"bit {bit} of {at}, {name}", whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :]
        at, length = chance.randrange(end), chance.randrange(1, 200)
        yield f"{length} bytes inserted at {at}", whole[:at] + chance.randbytes(length) + whole[at:]
        yield f"{length} bytes deleted at {at}", whole[:at] + whole[at + length :]
        yield f"{length} bytes appended", whole + chance.randbytes(length)
        yield f"{length} zeros appended", whole + bytes(length)
        if any(whole[at : at + 512]):
            yield f"a sector of zeros at {at}", whole[:at] + bytes(min(512, end - at)) + whole[at + 512 :]
        yield f"the first half twice, {end}", whole[: end // 2] * 2
        yield "itself twice", whole * 2


def refusal(path: Path) -> str:
    """Return why a file is not loaded, nothing if it is."""
    try:
        load(path)
    except CheckpointError as error:
        return str(error)
    return ""


def test_every_corruption_is_found(saved: Path) -> None:
    """200 damaged files of eleven kinds: each is a CheckpointError, and is as it was after it."""
    whole = saved.read_bytes()
    made = corruptions(whole, random.Random(1))
    for _ in range(CORRUPTIONS):
        what, damaged = next(made)
        assert damaged != whole
        saved.write_bytes(damaged)
        assert "Nothing was loaded" in refusal(saved), what
        assert {"run.pt": damaged} == contents(saved.parent)
    saved.write_bytes(whole)
    assert load(saved)["step"] == 3


def test_every_bit_of_the_edges_is_covered(tmp_path: Path) -> None:
    """Each byte of a small file, where headers, pickle, padding and directory are all there is."""
    path = tmp_path / "run.pt"
    save(path, weights=torch.arange(3), step=1)
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
        with pytest.raises(CheckpointError):
            load(path)


def test_each_fault_has_its_own_message(saved: Path) -> None:
    """Empty, cut, damaged in a tensor, damaged elsewhere, followed by something, of another version."""
    whole = saved.read_bytes()
    tensor = whole.index(torch.arange(LARGE, dtype=torch.float32).numpy().tobytes())
    messages = {
        "is empty": b"",
        "is cut short": whole[:-1000],
        f"mismatch in 1 of 1 large tensors, {4 * LARGE:,} of": whole[: tensor + 99] + b"?" + whole[tensor + 100 :],
        "mismatch outside of the large tensors": whole.replace(b"step", b"stop", 1),
        "its seal": whole[:-1] + b"?",
        "something follows": whole + b"\n",
        "has format 2": whole.replace(b"mixedopt 1", b"mixedopt 2"),
    }
    for message, damaged in messages.items():
        saved.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=message) as raised:
            load(saved)
        assert str(saved) in str(raised.value)
        assert "Use a" in str(raised.value) or "Use the" in str(raised.value)


class Canary:
    """What makes a directory when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def foreign(path: Path, canary: Path) -> dict[str, Callable[[], object]]:
    """Return message -> what writes a file that is not a checkpoint of this library."""

    def a_zip() -> None:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("readme.txt", "hello")

    def a_seal_over_code() -> None:
        torch.save({"a": Canary(canary)}, path)
        with open(path, "r+b") as file:
            files._seal(file)

    def a_seal_over_a_list() -> None:
        torch.save([1], path)
        with open(path, "r+b") as file:
            files._seal(file)

    return {
        "is not a checkpoint": lambda: path.write_text("hello " * 100),
        "is not a checkpoint.": lambda: path.write_bytes(b"\0"),
        "is a zip archive, but not one of torch": a_zip,
        "written by torch.save. Load it with torch.load": lambda: torch.save({"a": torch.ones(2)}, path),
        "has no checksum": lambda: torch.save({"a": Canary(canary)}, path),
        "is a pickle, which could run code": lambda: path.write_bytes(pickle.dumps(Canary(canary))),
        "is a pickle": lambda: torch.save({"a": Canary(canary)}, path, _use_new_zipfile_serialization=False),
        "holds what .* does not read": a_seal_over_code,
        "holds a list": a_seal_over_a_list,
    }


@pytest.mark.parametrize("message", foreign(Path(), Path()))
def test_no_file_of_others_is_loaded_and_no_code_runs(tmp_path: Path, message: str) -> None:
    """Each is told by what it is; even a seal makes no code run."""
    path, canary = tmp_path / "run.pt", tmp_path / "canary"
    foreign(path, canary)[message]()
    for mmap in (False, True):
        with pytest.raises(CheckpointError, match=message):
            load(path, mmap=mmap)
    assert ["run.pt"] == os.listdir(tmp_path)


def test_the_canary_sings(tmp_path: Path) -> None:
    """The pickle of the tests above would have run code."""
    pickle.loads(pickle.dumps(Canary(tmp_path / "canary")))
    assert (tmp_path / "canary").is_dir()


def test_a_damaged_pickle_never_reaches_torch(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checksum comes first."""
    read = []
    monkeypatch.setattr(torch, "load", lambda *args, **options: read.append(args))
    saved.write_bytes(saved.read_bytes().replace(b"step", b"stop", 1))
    with pytest.raises(CheckpointError):
        load(saved)
    assert read == []


@pytest.mark.parametrize("mmap", [False, True], ids=["read", "mapped"])
def test_a_file_that_is_replaced_while_it_is_read_is_checked_too(
    saved: Path, monkeypatch: pytest.MonkeyPatch, mmap: bool
) -> None:
    """What was checked is what is loaded: another file that takes the name is checked in its turn."""
    torch_load, opened = torch.load, []

    def replace() -> None:
        torch.save({"step": "unchecked"}, saved.with_name("new"))
        saved.with_name("new").replace(saved)

    def opening(path: str, mode: str) -> Any:
        opened.append(path)
        if len(opened) == 2 and not mmap:
            replace()
        return open(path, mode)

    def mapping(*args: Any, **options: Any) -> Any:
        replace()
        return torch_load(*args, **options)

    monkeypatch.setattr(files, "open", opening, raising=False)
    if mmap:
        monkeypatch.setattr(torch, "load", mapping)
    with pytest.raises(CheckpointError, match="has no checksum"):
        load(saved, mmap=mmap)
    assert len(opened) == 4


def test_a_file_that_shrinks_while_it_is_read_is_an_error(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody writes it in place: no tensor of it is returned."""
    records = files._records

    def shrinking(place: str, source: Any) -> Any:
        try:
            return records(place, source)
        finally:
            os.truncate(place, 3000)

    monkeypatch.setattr(files, "_records", shrinking)
    monkeypatch.setattr(torch, "load", lambda *args, **options: {})
    with pytest.raises(CheckpointError, match="became shorter"):
        load(saved)


def test_an_error_of_the_disk_is_passed_on(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sector that cannot be read is an ``OSError``, not a wrong checksum."""

    def broken(source: Any) -> Any:
        raise OSError(errno.EIO, "I/O error")

    monkeypatch.setattr(files, "_tensors", broken)
    with pytest.raises(OSError, match="I/O error"):
        load(saved)


def test_an_error_of_torch_is_passed_on(saved: Path) -> None:
    """A device that is not there is no fault of the file."""
    with pytest.raises(RuntimeError, match="nowhere"):
        load(saved, map_location="nowhere")
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("mixedopt")]


def test_paths_may_be_bytes_and_names_long(tmp_path: Path) -> None:
    """As ``open`` takes them."""
    for path in (os.fsencode(tmp_path / "bytes.pt"), tmp_path / ("x" * 240)):
        save(path, step=3)
        assert load(path) == {"step": 3}
