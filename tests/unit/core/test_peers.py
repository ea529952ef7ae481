from __future__ import annotations

import pickle
import socket
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ovmstrio.core.connection import (
    NO_PROXIES,
    UNKNOWN,
    UNKNOWN_PEER,
    ClientAddress,
    Loopback,
    Peer,
    Remote,
    TrustedProxies,
    UnixSocket,
    Unknown,
    socket_address,
)
from ovmstrio.core.errors import PermissionDenied
from ovmstrio.core.events import WireRequest
from ovmstrio.core.http_messages import HttpRequest
from ovmstrio.protocols.admin.changes import check_is_local, is_local

Pairs = tuple[tuple[str, str], ...]

LOOPBACK = Loopback("127.0.0.1", 5)
IPV4, IPV6, UNIX = socket.AF_INET, socket.AF_INET6, socket.AF_UNIX
NAMES = ("x-forwarded-for", "forwarded", "via", "x-real-ip", "x-envoy-internal", "host", "accept")
VALUES = ("127.0.0.1", "::1", "for=127.0.0.1", "for=unix", "unix", "", "unknown", 'for="[::1]:1"', "10.0.0.1, ::1")
headers_ = st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from(VALUES) | st.text(max_size=20)), max_size=4).map(
    tuple
)
proxies_ = st.sampled_from(["", "unix", "127.0.0.0/8,::1", "0.0.0.0/0,::/0,unix", "10.0.0.0/8"]).map(
    TrustedProxies.parse
)
hosts_ = st.ip_addresses().map(str) | st.sampled_from(
    ["::ffff:10.0.0.1", "fe80::1%eth0", "127.0.0.1", "::1", "", "unix"]
)
distrusted_ = st.builds(Remote, hosts_, st.integers(0, 65_535)) | st.builds(
    Unknown, st.text(max_size=9), st.sampled_from([None, LOOPBACK, UnixSocket(), Remote("10.0.0.1")])
)


@pytest.mark.parametrize(
    ("family", "name", "expected"),
    [
        (UNIX, "", UnixSocket()),
        (UNIX, b"\0abstract", UnixSocket()),
        (UNIX, None, UnixSocket()),
        (IPV4, ("127.0.0.1", 7), Loopback("127.0.0.1", 7)),
        (IPV4, ("127.8.9.10", 7), Loopback("127.8.9.10", 7)),
        (IPV4, ("10.0.0.1", 7), Remote("10.0.0.1", 7)),
        (IPV4, ("0.0.0.0", 7), Remote("0.0.0.0", 7)),
        (IPV6, ("::1", 7, 0, 0), Loopback("::1", 7)),
        (IPV6, ("::ffff:127.0.0.1", 7, 0, 0), Loopback("::ffff:127.0.0.1", 7)),
        (IPV6, ("::ffff:10.0.0.1", 7, 0, 0), Remote("::ffff:10.0.0.1", 7)),
        (IPV6, ("fe80::1%eth0", 7, 0, 2), Remote("fe80::1%eth0", 7)),
        (IPV6, ("::127.0.0.1", 7, 0, 0), Remote("::127.0.0.1", 7)),
        (IPV4, "", UNKNOWN),
        (IPV4, None, UNKNOWN),
        (IPV4, ("", 0), UNKNOWN),
        (IPV4, ("unix", 0), UNKNOWN),
        (IPV4, ("localhost", 0), UNKNOWN),
        (IPV4, (), UNKNOWN),
        (socket.AF_VSOCK, (2, 7), UNKNOWN),
        (socket.AF_NETLINK, (0, 0), UNKNOWN),
    ],
)
def test_clients_are_identified_by_the_family_and_address_of_the_socket(
    family: int, name: object, expected: ClientAddress
) -> None:
    assert socket_address(family, name) == expected
    assert type(socket_address(family, name)) is type(expected)


@pytest.mark.parametrize(
    ("address", "text", "host", "endpoint"),
    [
        (LOOPBACK, "127.0.0.1", "127.0.0.1", "127.0.0.1:5"),
        (Remote("::2", 6), "::2", "::2", "[::2]:6"),
        (UnixSocket(), "unix", "", "unix:"),
        (UNKNOWN, "unknown", "unknown", "unknown"),
        (Unknown("a proxy", UnixSocket()), "unix", "", "unix:"),
        (Unknown("a proxy", LOOPBACK), "127.0.0.1", "127.0.0.1", "127.0.0.1:5"),
    ],
)
def test_addresses_have_texts_for_logs_and_for_user_code(
    address: ClientAddress, text: str, host: str, endpoint: str
) -> None:
    assert (str(address), address.host, address.endpoint) == (text, host, endpoint)
    assert pickle.loads(pickle.dumps(address)) == address


@given(address=distrusted_, headers=headers_, proxies=proxies_)
def test_unknown_and_remote_peers_are_never_local(
    address: ClientAddress, headers: Pairs, proxies: TrustedProxies
) -> None:
    client = Peer(address, None, proxies).client(headers)
    assert not is_local(client)
    with pytest.raises(PermissionDenied):
        check_is_local(client, "rule", "hint")
    if isinstance(address, Unknown):
        assert client is address


@given(headers=headers_, name=st.sampled_from(NAMES[:5]), value=st.sampled_from(VALUES), unix=st.booleans())
@example(headers=(), name="x-forwarded-for", value="127.0.0.1", unix=False)
def test_requests_of_proxies_are_never_local(headers: Pairs, name: str, value: str, *, unix: bool) -> None:
    address = UnixSocket() if unix else LOOPBACK
    for proxies in (NO_PROXIES, TrustedProxies.parse("unix, 127.0.0.1")):
        assert not is_local(Peer(address, None, proxies).client((*headers, (name, value))))


@given(headers=headers_)
def test_no_default_of_a_connection_or_request_is_local(headers: Pairs) -> None:
    defaults: list[Any] = [HttpRequest("POST", "/", headers=headers), WireRequest("HTTP", "POST", "/", headers, Peer())]
    clients = [Peer().client(headers), UNKNOWN_PEER.client(headers), *(request.client for request in defaults)]
    assert clients == [UNKNOWN] * 4
    assert not any(map(is_local, clients))


@pytest.mark.parametrize("value", ["", "unix", "127.0.0.1", "::1", None, "localhost", Unknown, Loopback])
def test_only_address_types_are_local(value: Any) -> None:
    assert not is_local(value)


def test_local_peers_are_local_whatever_other_headers_they_send() -> None:
    for address in (LOOPBACK, UnixSocket(), Loopback("::1")):
        client = Peer(address).client((("host", "h"), ("x-request-id", "1"), ("user-agent", "curl")))
        assert client is address
        assert is_local(client)


XFF, FORWARDED = "x-forwarded-for", "forwarded"


@pytest.mark.parametrize(
    ("headers", "client"),
    [
        ([(XFF, "203.0.113.9")], "203.0.113.9"),
        ([(XFF, "1.1.1.1, 203.0.113.9")], "203.0.113.9"),
        ([(XFF, "1.1.1.1,203.0.113.9 ,10.0.0.2,\t10.0.0.3")], "203.0.113.9"),
        ([(XFF, "1.1.1.1"), (XFF, "203.0.113.9"), (XFF, "10.0.0.2")], "203.0.113.9"),
        ([(XFF, "nonsense, 203.0.113.9")], "203.0.113.9"),
        ([(XFF, "203.0.113.9:4711")], "203.0.113.9"),
        ([(XFF, "[2001:db8::9]:4711")], "2001:db8::9"),
        ([(XFF, "2001:db8::9")], "2001:db8::9"),
        ([(XFF, "203.0.113.9, ::ffff:10.0.0.2")], "203.0.113.9"),
        ([(XFF, "1.1.1.1, ::ffff:203.0.113.9")], "203.0.113.9"),
        ([(XFF, "127.0.0.1")], "127.0.0.1"),
        ([(XFF, "10.0.0.5, 10.0.0.2")], "10.0.0.5"),
        ([(XFF, "203.0.113.9, nonsense")], ""),
        ([(XFF, "203.0.113.9, unknown, 10.0.0.2")], ""),
        ([(XFF, "203.0.113.9,")], ""),
        ([(XFF, "")], ""),
        ([(XFF, "unix")], ""),
        ([(XFF, "203.0.113.9:99999")], ""),
        ([(XFF, "1.1.1.1.")], ""),
        ([(XFF, ", ".join(["203.0.113.9", *["10.0.0.2"] * 40]))], ""),
        ([(FORWARDED, "for=203.0.113.9")], "203.0.113.9"),
        ([(FORWARDED, 'For="203.0.113.9:4711";proto=http;by=10.0.0.1')], "203.0.113.9"),
        ([(FORWARDED, 'for=1.1.1.1, for="[2001:db8::9]:4711" , for=10.0.0.2')], "2001:db8::9"),
        ([(FORWARDED, 'for=203.0.113.9;by="a,for=1.1.1.1"')], "203.0.113.9"),
        ([(FORWARDED, 'for="203.0.113\\.9"')], "203.0.113.9"),
        ([(FORWARDED, "for=1.1.1.1"), (FORWARDED, "for=203.0.113.9")], "203.0.113.9"),
        ([(FORWARDED, "for=203.0.113.9;for=1.1.1.1")], ""),
        ([(FORWARDED, "for=203.0.113.9, by=10.0.0.1")], ""),
        ([(FORWARDED, "for=_hidden")], ""),
        ([(FORWARDED, "for=unknown")], ""),
        ([(FORWARDED, 'for="203.0.113.9')], ""),
        ([(FORWARDED, 'for=1.1.1.1, x="y, for=203.0.113.9')], ""),
        ([(FORWARDED, "203.0.113.9")], ""),
        ([(FORWARDED, "")], ""),
        ([(XFF, "203.0.113.9"), (FORWARDED, "for=203.0.113.9")], "203.0.113.9"),
        ([(XFF, "203.0.113.9"), (FORWARDED, "for=1.1.1.1")], ""),
        ([("x-real-ip", "203.0.113.9")], ""),
        ([("host", "h")], ""),
    ],
)
def test_a_trusted_proxy_names_the_client(headers: list[tuple[str, str]], client: str) -> None:
    proxies = TrustedProxies.parse("10.0.0.0/8, unix")
    for address in (Remote("10.0.0.1", 5), Remote("::ffff:10.0.0.1", 5), UnixSocket()):
        found = Peer(address, None, proxies).client(headers)
        if client:
            assert isinstance(found, Remote)
            assert found.host == client
        else:
            assert isinstance(found, Unknown)
            assert found.reason


def test_headers_of_untrusted_peers_are_ignored() -> None:
    peer = Peer(Remote("192.0.2.1", 5), None, TrustedProxies.parse("10.0.0.0/8,127.0.0.1,unix"))
    assert peer.client([(XFF, "203.0.113.9")]) is peer.address


@pytest.mark.parametrize("text", ["10.0.0.0/33", "10.0.0.1/8", "proxy", "10.0.0.1;10.0.0.2", "UNIX:", "10.0.0.1:80"])
def test_other_texts_are_refused_as_proxies(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected addresses, networks such as 10\.0\.0\.0/8, or unix, got "):
        TrustedProxies.parse(f"127.0.0.1, {text}")


def test_networks_contain_their_addresses_in_every_form() -> None:
    for text in ("10.0.0.0/8", "::ffff:10.0.0.0/104", " 10.0.0.1 ,"):
        assert TrustedProxies.parse(text).trusts(Remote("::ffff:10.0.0.1"))
        assert not TrustedProxies.parse(text).trusts(Remote("11.0.0.1"))
        assert not TrustedProxies.parse(text).trusts(UnixSocket())
        assert not TrustedProxies.parse(text).trusts(UNKNOWN)
    assert TrustedProxies.parse("fe80::/10").trusts(Remote("fe80::1%eth0"))
