"""The judge of machine code finds what is wrong in excerpts of kernels. What it says of whole kernels:
test_compile_all.py."""

from __future__ import annotations

import pytest

from tests.unit.cuda import sass

#: a main loop of two groups in flight and what comes behind it; {} is filled in by the tests
LOOP = """
.text.gemm:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/                   CS2R R150, SRZ ;
.L_x_8:
        /*0020*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P2, [UR5+0x30018], R11 ;
        /*0030*/              @!P2 BRA `(.L_x_7) ;
.L_x_39:
        /*0040*/                   WARPGROUP.ARRIVE ;
        /*0050*/                   UIADD3.64 UR18, UR14, 0x80, URZ ;
        /*0060*/                   HGMMA.64x256x16.F32.BF16 R24, gdesc[UR12].tnspB, R24 ;
        /*0070*/                   IMAD.MOV.U32 R9, RZ, RZ, R12 ;
        /*0080*/                   HGMMA.64x256x16.F32.BF16 R24, gdesc[UR16].tnspB, R24, gsb0 ;
{inside}
        /*0090*/                   WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
.L_x_48:
        /*00a0*/              @!P1 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR5+0x30030], RZ ;
        /*00b0*/                   ISETP.NE.AND P1, PT, R16, 0x80, PT ;
        /*00c0*/               @P1 BRA `(.L_x_8) ;
        /*00d0*/                   IABS R9, R5.reuse ;
{before}
        /*00e0*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
{behind}
        /*00f0*/                   EXIT ;
.L_x_7:
        /*0100*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P2, [UR5+0x30018], R11 ;
        /*0110*/              @!P2 BRA `(.L_x_7) ;
        /*0120*/                   BRA `(.L_x_39) ;
"""
CONVERTS = "        /*{:04x}*/                   F2FP.BF16.F32.PACK_AB R19, R133, R132 ;"


def excerpt(**lines: str) -> str:
    return LOOP.format(**{"inside": "", "before": "", "behind": "", **lines})


def kinds(text: str) -> set[str]:
    return {f.kind for f in sass.faults(text)}


def test_an_accumulator_read_in_front_of_its_wait():
    """As ptxas 13.0 has it of a persistent GEMM whose conversions it moves over the wait."""
    (function,) = sass.functions(excerpt())
    assert function.name == "gemm" and function.products == 2 and len(sass._loops(function)) == 2
    assert sass.faults(excerpt(behind=CONVERTS.format(0xE8))) == []
    (fault,) = sass.faults(excerpt(before=CONVERTS.format(0xD8)))
    assert fault.kind == "early" and "R132…R133" in str(fault) and "/*00d8*/ F2FP" in str(fault)


def test_cuobjdump_is_read_too():
    places = {".L_x_8": "0x20", ".L_x_39": "0x40", ".L_x_7": "0x100"}
    for faulty in (False, True):
        text = excerpt(**{"before" if faulty else "behind": CONVERTS.format(0xD8 if faulty else 0xE8)})
        for label, address in places.items():
            text = text.replace(f"`({label})", address).replace(f"{label}:\n", "")
        text = text.replace(".text.gemm:", "\tFunction : gemm").replace(
            " ;", " ;     /* 0x00000a00ff017b82 */\n     /* 0x000fe20000000800 */"
        )
        assert kinds(text) == ({"early"} if faulty else set())


@pytest.mark.parametrize(
    "kind, place, line",
    [
        ("early", "inside", "STS.128 [R3], R40 ;"),  # four registers, of 24 to 151
        ("early", "inside", "IMAD.WIDE R22, R2, 0x4, R22 ;"),  # none: see below
        ("early", "inside", "IMAD.WIDE R23, R2, 0x4, R6 ;"),  # 23 and 24
        ("early", "inside", "STSM.16.M88.4 [R3], R148 ;"),
        ("early", "inside", "FMUL R151, R151, R4 ;"),
        (
            "early",
            "inside",
            "HGMMA.64x128x16.F32.BF16 R32, gdesc[UR16], R32, gsb0 ;",
        ),  # another accumulator, in part the same
        (
            "early",
            "inside",
            "HGMMA.64x64x16.F32.BF16 R152, R24, gdesc[UR16], R152, gsb0 ;",
        ),  # reads it as the left operand
        ("fence", "inside", "MEMBAR.ALL.GPU ;"),
        ("fence", "inside", "MEMBAR.SC.SYS ;"),
        ("spill", "behind", "LDL R4, [R1] ;"),
        ("serial", "inside", "HGMMA.64x8x16.F16 RZ, gdesc[URZ], RZ, !UPT, gsb0 ;"),
        ("left", "behind", "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR16], R24 ;"),
    ],
)
def test_faults(kind: str, place: str, line: str):
    found = kinds(excerpt(**{place: f"        /*0088*/                   {line}"}))
    assert not found if "R22" in line else kind in found, (line, found)


def test_what_is_none():
    for place, line in (
        ("before", "MEMBAR.ALL.GPU ;"),
        ("inside", "MEMBAR.ALL.CTA ;"),
        ("inside", "ATOMG.E.ADD PT, R4, desc[UR4][R2.64], R5 ;"),
    ):
        assert sass.faults(excerpt(**{place: f"        /*0088*/                   {line}"})) == []


LEFT_OPERAND = """
.text.attention:
        /*0000*/                   WARPGROUP.ARRIVE ;
        /*0010*/                   HGMMA.64x128x16.F32.BF16 R24, R4, gdesc[UR8], R24, gsb0 ;
        /*0020*/                   HGMMA.64x128x16.F32.BF16 R88, R8, gdesc[UR12], R88, gsb0 ;
        /*0030*/                   WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
        /*0040*/                   FMUL R24, R24, R2 ;
        /*0050*/                   {} ;
        /*0060*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0070*/                   EXIT ;
"""


@pytest.mark.parametrize(
    "line, faulty",
    [
        ("F2FP.BF16.F32.PACK_AB R5, R2, R3", False),
        ("F2FP.BF16.F32.PACK_AB R9, R2, R3", True),
        ("FADD R2, R9, R3", False),
    ],
)
def test_a_left_operand_in_registers(line: str, faulty: bool):
    """The older group is complete, and its operands may be written; the younger one's may only be read."""
    assert kinds(LEFT_OPERAND.format(line)) == ({"operand"} if faulty else set())


def test_ways_that_meet():
    """What is in flight on one of two ways counts."""
    text = """
.text.k:
        /*0000*/                   HGMMA.64x64x16.F32.F16 R24, gdesc[UR8], RZ, !UPT, gsb0 ;
        /*0010*/               @P0 BRA `(.L_x_1) ;
        /*0020*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
.L_x_1:
        /*0030*/                   FADD R30, R30, R2 ;
        /*0040*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0050*/                   EXIT ;
"""
    assert kinds(text) == {"early"}
    assert kinds(text.replace("@P0 BRA", "    BRA")) == {"early"}
    assert kinds(text.replace("@P0 BRA `(.L_x_1)", "    NOP")) == set()
