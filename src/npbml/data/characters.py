"""Which characters are the classes of `glyphs`: code points by script, and scripts by split.

The list is data, not a search through the Unicode tables or the fonts, so that neither a newer Python nor a
newer font can change it. It was made once: of the letters, digits and symbols below that the fonts hold, in
this order of scripts except that the symbols came last, a character was left out when any face of it
resembled any face of one kept before it (cosine similarity of at least `LOOK_ALIKE` between the renderings,
see `glyphs.resemblance`). So of A, Greek Alpha and Cyrillic A only the first is here, and of O and o too.
Four Georgian letters that the faces draw in quite different shapes were left out by hand.
"""

from npbml.data.store import Split

LOOK_ALIKE = 0.94

SCRIPTS: dict[Split, dict[str, str]] = {
    "train": {
        "digits": "30-37 39",
        "latin": """
            41-43 45 48 4B-4E 50-52 54-5A 62 64-66 6A-6B 6D 71-72 74 79 C6 DE E6 F0 F8 14A 152 184 186 188
            18A-18B 18F 191 193-195 19B-19D 1A2 1A4 1A6-1A7 1A9-1AB 1B2 1B8 1BA 1BE 1C1-1C3 1E4 1F6 21C 222
            224 234-235 238-239 23B 23E-242 255-256 258 25A 25D 25F-260 267 26E 270-272 277-279 27B 281 287
            28D-28E 290-292 294-296 298 29E 2A3-2A4 2A6-2AE 1D0C 1D0E 1D12 1D16-1D17 1D19-1D1A 1D1D-1D1F
            1D24-1D25 1D7B 1D7D-1D7E 1D81 1D84 1D8A 1D8D-1D8E 1E9E 1EFA 2C64-2C6A 2C71 2C73-2C75 2C77 2C79
            A722 A724 A726 A728-A729 A72B A72E A730-A731 A734 A736-A739 A73C-A73D A73F A746-A747 A74E A750
            A752-A753 A767 A780 A782 A787 A78D-A78E A790-A791 A7A0-A7A2 A7A5-A7A8 A7AA A7FB A7FD A7FF""",
        "greek": "372 37C 394 39E 3B1-3B2 3B6 3BD-3BE 3C4 3D7 3D9-3DA 3DE 3E0-3E1 3FA-3FB",
        "cyrillic": """
            409 40B 414 416 429-42B 42E 45F-460 463-464 466 468 46A 46C 46E 470-471 478-47A 47C 47E 482 48A
            490 494 496 498 4A0 4A4 4A6 4A8 4AC 4B2 4B6 4BC 4BE 4C4-4C5 4CA 4CD 4F6 4FA 4FD 500 502 504 506
            508 50F 513-514 516-519 520 522 A64C A651 A654 A656 A662 A664 A666 A66A A66E A68A A695""",
        "canadian syllabics": """
            1401-1402 1405-1406 140A-140C 140F-1415 1417-141A 141D 141F-1420 1422 1425 1428-1429 142B
            142D-142E 1432-1434 1438-143D 143F-1447 144D 144F 1451 1454 1456-1464 1469 146C 146E 1470
            1473-147C 147E-1481 1483 1489-148C 148E 1490-14A0 14A2 14A9 14AB-14AF 14B1-14BA 14BC 14C0-14C5
            14C7-14CB 14CD 14D3-14D8 14DA-14DE 14E0-14E9 14EC-14EF 14F2 14F5-14FB 1502-1505 1507 1510-1524
            1526-152B 152D-153C 1542-154F 1552-1553 1555-1556 155D 1560 1566 1574 1576-157A 157E-1585
            158A-158F 1591-1596 15A0 15A2-15A5 15A8 15E1 1647 166F-1676""",
        "arrows": """
            2190 2192-2193 2196-2199 219C-219D 219F 21A2-21A4 21A6-21AD 21AF-21B4 21B6-21BE 21C0-21C1
            21C3-21C6 21D0 21D2 21D5-21DB 21DF 21E1 21E4-21E5 21E7 21E9 21EB 21F0-21F2 21F4-21F7""",
        "mathematics": """
            2201 2205 2208 220F 2213-2217 221A 221C-221D 221F-2222 222E 2234-2235 2237-2239 223B 223F-2240
            2242-2243 2245-2246 224D-2254 2256-2257 2259-225B 225D-225F 2263-226C 2276-2277 227A-227F
            2286-2287 228A-228B 228D 228F-2290 2293 2297 229E 22A0 22A2-22A3 22A5 22A7-22AB 22B0-22B1 22B4
            22B6 22B8-22B9 22BB-22C0 22C4 22C6-22CC 22CF-22D2 22D4-22DF 22E6-22E7 22F0-22F2 22F5-22F6
            22F8-22FB 22FD 22FF""",
        "apl": "2336-233C 233E 2340-2347 2349-2356 2358 235A-236A 236E 2370-2372 2376-2379",
    },
    "val": {
        "georgian": """
            10A2-10A5 10A7-10AB 10AE 10B0 10B2 10B4-10B5 10B8 10BA 10BC-10BD 10C1-10C5 10D0 10D3-10D4
            10D9 10DD 10DF-10E0 10E2 10E4-10E6 10E9 10ED 10F0 10F2-10F5 10F7 10F9 2D00-2D04 2D06 2D0B
            2D0F 2D11-2D12 2D15 2D18-2D19 2D1C-2D1D 2D1F 2D21-2D22 2D24-2D25""",
        "old italic": "10302 10304-10305 1030A-1030D 10310 10314-10316 10318-1031A 1031D 10323",
        "coptic": "3E2 3E6-3E8 3EA 3EC 3EE",
        "ogham": "1681-1684 1686-1689 168B-168E 1691-1692 1696-1698 169A",
    },
    "test": {
        "armenian": "532 535-539 53B 53F-541 543 547 549-54A 54C 54E 552 554 556 569 56D 574 579 57C 586",
        "arabic": """
            621 628-62C 62E-634 637 639-63A 641-643 645-646 648-64A 661-662 669 66E 67B-67C 681 688-689 68B
            68E 691-693 695 69D 6A0-6A2 6A4-6A5 6A8-6AA 6AD-6AE 6B0 6B2-6B4 6B8-6BA 6BD-6BE 6C6 6C8 6CE 6D0
            6F4 6F6""",
        "hebrew": "5D0-5D1 5D3-5D4 5DA 5DC 5DE 5E2 5E5-5E7 5E9",
        "tifinagh": """
            2D33 2D3B-2D3F 2D42-2D44 2D46 2D48 2D4B-2D4C 2D4E 2D50 2D52-2D53 2D55-2D58 2D5A-2D5B 2D62-2D64""",
        "lao": "E82 E88 E8A E8D E95-E96 E99 E9C-E9E EA3 EA7 EAA EAF-EB0 EBD EC0-EC4 EC6 ED1-ED4 ED6-ED9",
        "nko": "7C1-7C4 7C7 7C9 7CD-7CE 7D0-7D2 7D4 7D6-7D8 7DA 7DD-7DF 7E2 7E4",
    },
}


def characters() -> list[tuple[Split, str, int]]:
    """(split, script, code point) of every class, in the order in which the store holds them."""
    return [
        (split, script, code)
        for split, scripts in SCRIPTS.items()
        for script, spans in scripts.items()
        for span in spans.split()
        for code in _span(span)
    ]


def _span(text: str) -> range:
    first, _, last = text.partition("-")
    return range(int(first, 16), int(last or first, 16) + 1)
