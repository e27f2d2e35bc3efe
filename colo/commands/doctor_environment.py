"""What colo doctor finds in the environment: torch's allocator, VLLM_* variables, ports. Values in, findings out."""

import socket
from collections.abc import Mapping

from colo.commands.doctor_checks import GIB, Finding, note, ok, wrong

ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
UNCACHED = "PYTORCH_NO_CUDA_MEMORY_CACHING"


def allocator(environment: Mapping[str, str], *, on_gpu: bool) -> list[Finding]:
    """Settings of torch's allocator with which vLLM's memory pools, which a sleep frees, do not work."""
    found = []
    bad = wrong if on_gpu else note
    for variable in ALLOCATOR_VARIABLES:
        value = environment.get(variable)
        if value is None:
            continue
        pairs = [item.strip().partition(":") for item in value.split(",")]
        options = {name: setting for name, _, setting in pairs}
        if options.get("backend", "native") != "native":
            do = f"take backend:{options['backend']} out of {variable}"
            found.append(bad("allocator", f"{variable}={value}: a sleep needs the native backend's pools", do))
        elif options.get("expandable_segments", "").lower() == "true":
            said = f"{variable}={value}: vLLM turns expandable_segments off around its own pools, and on again"
            found.append(note("allocator", said))
        else:
            found.append(ok("allocator", f"{variable}={value}"))
    if environment.get(UNCACHED, "0") not in ("", "0"):
        said = f"{UNCACHED} is set: without torch's allocator a sleep frees nothing"
        found.append(bad("allocator", said, f"unset {UNCACHED}"))
    return found or [ok("allocator", "torch's defaults")]


def vllm_variables(environment: Mapping[str, str], *, on_gpu: bool, kv_room_bytes: int) -> list[Finding]:
    """VLLM_* that colo's engine cannot live with, or that take the place of a recipe's option.

    Args:
        environment: Of the launch.
        on_gpu: Whether the engine will run on one.
        kv_room_bytes: What a rank's KV cache could take of the host's memory, on CPU.
    """
    given = {name: value for name, value in environment.items() if name.startswith("VLLM_")}
    found = []
    if given.get("VLLM_ENABLE_V1_MULTIPROCESSING", "0") != "0":
        said = "VLLM_ENABLE_V1_MULTIPROCESSING is set: the engine has to live in the rank's own process"
        found.append(wrong("vllm_env", said, "unset it"))
    space = given.get("VLLM_CPU_KVCACHE_SPACE", "")
    if space and not on_gpu:
        said = f"VLLM_CPU_KVCACHE_SPACE={space} takes the place of engine.vllm.kv_cache_memory_bytes"
        fits = space.isdecimal() and int(space) * GIB <= kv_room_bytes
        room = f", and a rank has {kv_room_bytes / GIB:.1f} GiB left"
        found.append(note("vllm_env", said, "unset it") if fits else wrong("vllm_env", said + room, "unset it"))
    if found:
        return found
    told = ", ".join(f"{name}={value}" for name, value in sorted(given.items()) if "KEY" not in name)
    return [ok("vllm_env", told or "no VLLM_* variable is set")]


def ports(environment: Mapping[str, str], host: str) -> list[Finding]:
    """Whether ranks can find each other: this host's name, its loopback, and MASTER_ADDR and MASTER_PORT where set.

    colo train has torchrun choose the two; they are read by ranks that something else starts.
    """
    found = [_loopback(), _named_host(host)]
    interface = environment.get("GLOO_SOCKET_IFNAME", "")
    known = [name for _, name in socket.if_nameindex()]
    unknown = [name for name in interface.split(",") if name and name not in known]
    if unknown:
        do = f"name one of {', '.join(known)}, or unset it"
        found.append(wrong("ports", f"GLOO_SOCKET_IFNAME={interface}: there is no interface {unknown[0]}", do))
    address, port = environment.get("MASTER_ADDR"), environment.get("MASTER_PORT")
    if address is not None or port is not None:
        found.append(_master(address or "localhost", port or "0"))
    return found


def _loopback() -> Finding:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname(), 5):
            return ok("ports", "127.0.0.1 takes a connection")
    except OSError as error:
        return wrong("ports", f"127.0.0.1 takes no connection: {error}", "bring the interface lo up")


def _named_host(host: str) -> Finding:
    do = f"add {host} to /etc/hosts, or set GLOO_SOCKET_IFNAME for ranks on several hosts"
    try:
        address = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        return note("ports", f"the host's name {host} does not resolve ({error}): ranks meet on the loopback", do)
    if not _is_own(address):
        return note("ports", f"the host's name {host} is {address}, which is not its own: as if it had none", do)
    return ok("ports", f"{host} is {address}")


def _master(address: str, port: str) -> Finding:
    said = f"MASTER_ADDR={address} MASTER_PORT={port}"
    if not port.isdecimal() or int(port) > 65535:
        return wrong("ports", f"{said}: no port", "unset MASTER_PORT")
    try:
        resolved = str(socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        return wrong("ports", f"{said}: the address does not resolve ({error})", "unset MASTER_ADDR, or correct it")
    if not _is_own(resolved):
        return note("ports", f"{said}: of another host, where rank 0 has to run")
    try:
        _bind(resolved, int(port))
    except OSError as error:
        return wrong("ports", f"{said}: it cannot be bound ({error.strerror})", "unset MASTER_PORT, or name a free one")
    return ok("ports", f"{said}: free")


def _is_own(address: str) -> bool:
    try:
        _bind(address, 0)
    except OSError:
        return False
    return True


def _bind(address: str, port: int) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # else what a run before left in TIME_WAIT is taken
        one.bind((address, port))
