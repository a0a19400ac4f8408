"""``MoeConfig``: the problem, stated once and checked once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from moecomm.codecs.definition import Codec, find
from moecomm.errors import ConfigError

LAYOUTS: Final = ("batched", "grouped", "rank")
WIRES: Final = ("auto", "lines", "flags")
REDUCES: Final = ("receiver", "sender")
DISPATCH_DTYPES: Final = ("bfloat16", "float16", "float32", "float8_e4m3fn")
COMBINE_DTYPES: Final = ("bfloat16", "float16", "float32")
DECODED_DTYPES: Final = ("bfloat16", "float16", "float32")
SCALE_BLOCKS: Final = (16, 32, 64, 128, 256, 512)
MAX_TOP_K: Final = 32  # one lane of a warp per routing slot
MAX_EXPERTS: Final = 2048  # per-expert counters live in shared memory
MAX_RANKS: Final = 1024
MAX_TIMEOUT_S: Final = 86_400  # a day; every wait ends

LayoutName = Literal["batched", "grouped", "rank"]
Reduce = Literal["receiver", "sender"]
Wire = Literal["auto", "lines", "flags"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig:
    """One mixture-of-experts exchange. Must be equal on every rank of a group.

    Args:
        num_experts: experts over all ranks, 1 to 2048. Need not divide by the number of ranks.
        top_k: routing slots per token, 1 to 32, at most ``num_experts``.
        hidden: elements of one token's row; any positive number.
        max_tokens: most tokens a rank (with ``replicas``: a source group) sends in one dispatch.
        dispatch_dtype: what travels to the experts: ``bfloat16``, ``float16``, ``float32`` or
            ``float8_e4m3fn``. For fp8 the input may be fp8 already (with ``x_scale`` when
            ``scale_block`` is set), or bf16, fp16 or fp32, and is then cast inside dispatch.
        scale_block: columns that share one float32 scale (fp8 only): 16, 32, 64, 128, 256 or 512.
            The last block may be partial. ``None``: no scales.
        scale_pow2: round scales up to powers of two (what UE8M0 can hold); still float32.
        codec: how rows are encoded instead: a codec or its name (``docs/codecs.md``). The input is
            then bf16, fp16 or fp32, and the three fields above stay as they are. ``None`` or
            ``"copy"``: what they say.
        decode_to: with a codec: rows are decoded on arrival, to ``bfloat16``, ``float16`` or
            ``float32``. ``None``: ``recv.x`` is what travelled, beside its scales.
        combine_dtype: what travels back, and the dtype of the output.
        layout: how received rows lie; see ``moecomm.Received``.
        expert_alignment: ``grouped`` only: every expert's first row is a multiple of this.
        max_recv_tokens: most rows a rank (``grouped``, ``rank``) or one of its experts
            (``batched``) takes in. ``None``: the worst case, which cannot overflow.
        replicas: ranks that hold the same tokens and routing (a tensor-parallel group).
        reduce: where weights are applied: at the ``receiver`` of combine, or at its ``sender``.
        in_flight: handles that may be open at once.
        timeout_s: how long any wait for a peer may last; at most half as long again passes until
            it is known who is missing.
        wire: how a receiver learns that data is there. ``lines``: every 128-byte line carries a
            flag, which costs 7 % more bytes and saves a round of waiting; ``flags``: a flag word
            after each row; ``auto``: lines for small ``max_tokens`` and 16-byte rows.
        check_values: check ``topk_idx`` values on the device.
        num_sms: most streaming multiprocessors a kernel may use; ``None``: as many as help.

    Raises:
        ConfigError: a field breaks its rule; the message names field, value and rule.
    """

    num_experts: int
    top_k: int
    hidden: int
    max_tokens: int
    dispatch_dtype: str = "bfloat16"
    scale_block: int | None = None
    scale_pow2: bool = False
    codec: Codec | type | str | None = None  # type: what type checkers take a decorated class for
    decode_to: str | None = None
    combine_dtype: str = "bfloat16"
    layout: LayoutName = "batched"
    expert_alignment: int = 1
    max_recv_tokens: int | None = None
    replicas: int = 1
    reduce: Reduce = "receiver"
    in_flight: int = 2
    timeout_s: float = 30.0
    wire: Wire = "auto"
    check_values: bool = True
    num_sms: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.codec, str):
            object.__setattr__(self, "codec", find(self.codec))
        self._check_sizes()
        self._check_choices()
        self._check_codec()
        self._check_combinations()

    def _check_sizes(self) -> None:
        _integer("num_experts", self.num_experts, 1, MAX_EXPERTS)
        _integer("top_k", self.top_k, 1, MAX_TOP_K)
        _integer("hidden", self.hidden, 1)
        _integer("max_tokens", self.max_tokens, 1)
        _integer("expert_alignment", self.expert_alignment, 1)
        _integer("replicas", self.replicas, 1)
        _integer("in_flight", self.in_flight, 1)
        if self.max_recv_tokens is not None:
            _integer("max_recv_tokens", self.max_recv_tokens, 1)
        if self.num_sms is not None:
            _integer("num_sms", self.num_sms, 1)
        timeout = self.timeout_s
        number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
        if not number or not 0 < timeout <= MAX_TIMEOUT_S:
            raise ConfigError(
                f"timeout_s={timeout!r}: must be a number of seconds above 0, at most "
                f"{MAX_TIMEOUT_S}"
            )
        if self.top_k > self.num_experts:
            raise ConfigError(f"top_k={self.top_k}: must be at most num_experts={self.num_experts}")

    def _check_choices(self) -> None:
        _choice("dispatch_dtype", self.dispatch_dtype, DISPATCH_DTYPES)
        _choice("combine_dtype", self.combine_dtype, COMBINE_DTYPES)
        _choice("layout", self.layout, LAYOUTS)
        _choice("reduce", self.reduce, REDUCES)
        _choice("wire", self.wire, WIRES)
        for name in ("scale_pow2", "check_values"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}={getattr(self, name)!r}: must be True or False")

    def _check_codec(self) -> None:
        if self.codec is None:
            if self.decode_to is not None:
                raise ConfigError(f"decode_to={self.decode_to!r}: needs a codec that decodes")
            return
        if not isinstance(self.codec, Codec):
            raise ConfigError(f"codec={self.codec!r}: must be a codec, or the name of one")
        _choice("decode_to", self.decode_to, (None, *DECODED_DTYPES))
        for name, default in (
            ("dispatch_dtype", "bfloat16"),
            ("scale_block", None),
            ("scale_pow2", False),
        ):
            if getattr(self, name) != default:
                raise ConfigError(
                    f"{name}={getattr(self, name)!r} with codec={self.codec.name!r}: the codec "
                    f"says what travels; leave {name} as it is"
                )

    def _check_combinations(self) -> None:
        if self.scale_block is not None:
            _choice("scale_block", self.scale_block, SCALE_BLOCKS)
            if self.dispatch_dtype != "float8_e4m3fn":
                raise ConfigError(
                    f"scale_block={self.scale_block}: only dispatch_dtype='float8_e4m3fn' has "
                    f"scales, not {self.dispatch_dtype!r}; leave scale_block=None"
                )
        if self.scale_pow2 and self.scale_block is None:
            raise ConfigError("scale_pow2=True: needs scale_block")
        if self.expert_alignment != 1 and self.layout != "grouped":
            raise ConfigError(
                f"expert_alignment={self.expert_alignment}: only layout='grouped' is aligned, "
                f"not {self.layout!r}"
            )
        if self.layout == "rank" and self.reduce == "sender":
            raise ConfigError(
                "reduce='sender': layout='rank' hands back rows that the caller has already "
                "weighted and summed; leave reduce='receiver'"
            )

    @property
    def coded(self) -> Codec | None:
        """``codec``, which is not a name any more."""
        return self.codec if isinstance(self.codec, Codec) else None

    @property
    def wire_dtype(self) -> str:
        """What travels to the experts."""
        return self.dispatch_dtype if self.coded is None else self.coded.wire_dtype

    @property
    def recv_dtype(self) -> str:
        """What ``recv.x`` is."""
        return self.decode_to or self.wire_dtype

    @property
    def num_scales(self) -> int:
        """Scales of a token's row that travel (the last block may be partial); 0: none."""
        if self.coded is not None:
            return self.coded.num_scales(self.hidden)
        return -(-self.hidden // self.scale_block) if self.scale_block else 0

    @property
    def recv_scales(self) -> int:
        """Scales of a row of ``recv.x``; 0: ``recv.x_scale`` is ``None``."""
        return 0 if self.decode_to else self.num_scales

    @property
    def weights_travel(self) -> bool:
        """Whether ``topk_weights`` must be given to dispatch."""
        return self.reduce == "sender"


def _integer(name: str, value: object, low: int, high: int | None = None) -> None:
    rule = f"must be an integer from {low}" + ("" if high is None else f" to {high}")
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name}={value!r}: {rule}")
    if value < low or (high is not None and value > high):
        raise ConfigError(f"{name}={value}: {rule}")


def _choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name}={value!r}: must be one of {', '.join(map(repr, choices))}")
