#!/usr/bin/env python3
"""Does weft clean and tokenize captions as the original's libraries do?

    check_text.py [--weft build/weft] [--captions 4000] [--json FILE]

Cleaning: generated captions full of addresses, HTML, dashes, quotes, codes and scripts through `weft text --cleaned` and through
captions.py, which uses ftfy, BeautifulSoup and Python's re; also with broken encodings, and as Wan cleans them. Tokenizer: a
SentencePiece model with T5's settings, trained here; 1,000 lines of mixed scripts, spaces, unknown characters and great length through `weft text --tokens`, the sentencepiece module and, where it can load the model,
transformers' T5 tokenizer. Exit status 0 if every plain caption and every id is the same, and 95 % of the broken captions.
"""
import pathlib
import random
import sys
import tempfile

import common
from reference import captions as reference
from reference import t5


def weft_text(weft, where, lines, option, *overrides):
    """The lines that `weft text` makes of these."""
    (where / "deck.toml").write_text("")
    (where / "in.txt").write_bytes("".join(line + "\n" for line in lines).encode())
    common.run([weft, "text", where / "deck.toml", where / "in.txt", *overrides, option, where / "out.txt"])
    return (where / "out.txt").read_bytes().decode().split("\n")[:-1]


def compare(name, given, ours, theirs, show=5):
    wrong = [i for i in range(len(given)) if ours[i] != theirs[i]]
    agreement = 1 - len(wrong) / len(given)
    print(f"{name}: {len(given)} lines, {100 * agreement:.2f} % the same")
    for i in wrong[:show]:
        print(f"  given  {given[i]!r}\n  weft   {ours[i]!r}\n  theirs {theirs[i]!r}")
    return agreement


def check_cleaning(weft, where, n, show):
    rates = {}
    for name, broken, model, clean in (("cleaning", False, "stdit3", reference.clean_text),
                                       ("cleaning_broken_encodings", True, "stdit3", reference.clean_text),
                                       ("cleaning_of_wan", True, "umt5", reference.clean_basic)):
        given = reference.captions(n, 7, broken)
        ours = weft_text(weft, where, given, "--cleaned", f"model.name={model}")
        rates[name] = compare(name, given, ours, [clean(c) for c in given], show)
    return rates


def lines_to_tokenize(n):
    rng = random.Random(11)
    lines = [" ".join(rng.choice(reference.WORDS) for _ in range(rng.choice([5, 30, 200]))) for _ in range(n - 60)]
    lines += ["", " ", "   two  spaces   here ", "\t tab", "ＦＵＬＬ width ﬁ ½", "e\u0301 combined", "𝔘𝔫𝔨𝔫𝔬𝔴𝔫 𓀀𓀁 unknown",
              "x" * 900, "unknown " + "𓀀" * 40, "\u00a0edge\u3000"]
    while len(lines) < n:
        lines.append("".join(chr(rng.choice([rng.randint(33, 126), rng.randint(0xa1, 0x24f), rng.randint(0x400, 0x4ff),
                                             rng.randint(0x4e00, 0x4eff), 0x20])) for _ in range(rng.randint(1, 600))))
    return lines


def check_tokens(weft, where):
    lines = lines_to_tokenize(1000)
    model = t5.train_tokenizer(where, 700, [" ".join(line.split()) for line in lines[:700]] * 3, character_coverage=0.9995)
    longest = 300
    ours = weft_text(weft, where, lines, "--tokens", f"t5.tokenizer={where / 'spiece.model'}", "t5.clean=false",
                     f"t5.max_length={longest}")
    ours = [[int(i) for i in line.split()] for line in ours]
    cut = lambda ids: ids[:longest - 1] + [1]  # noqa: E731
    rates = {"sentencepiece": compare("tokens, sentencepiece", lines, ours, [cut(model.encode(s)) for s in lines])}
    long = sum(len(ids) == longest for ids in ours)
    unknown = sum(2 in ids for ids in ours)
    print(f"  of them {long} cut to {longest} ids, {unknown} with unknown characters")
    try:
        from transformers import T5Tokenizer
        theirs = T5Tokenizer.from_pretrained(str(where))
        ids = theirs(lines, max_length=longest, truncation=True)["input_ids"]
    except Exception as problem:  # transformers 5 reads tokenizer.json, and not every model file
        print(f"  transformers' tokenizer does not load the model: {problem}")
    else:
        # The two differ over spaces alone; cleaned captions have single ones.
        plain = [i for i, s in enumerate(lines) if s and s == " ".join(s.split())]
        rates["transformers"] = compare("tokens, transformers", [lines[i] for i in plain], [ours[i] for i in plain],
                                        [ids[i] for i in plain])
    return rates, {"lines": len(lines), "cut": long, "with_unknown": unknown}


def main():
    a = common.parse(common.parser(__doc__, captions=4000, show=5))  # show: differences to print
    facts = common.about(a)
    with tempfile.TemporaryDirectory() as folder:
        where = pathlib.Path(folder)
        rates = check_cleaning(a.weft, where, a.captions, a.show)
        token_rates, counts = check_tokens(a.weft, where)
    rates.update(token_rates)
    common.write(a, facts, {"agreement": rates, "captions": a.captions, "tokenizer": counts})
    broken = [rates.pop(name) for name in ("cleaning_broken_encodings", "cleaning_of_wan")]
    return 0 if all(rate == 1 for rate in rates.values()) and min(broken) >= 0.95 else 1


if __name__ == "__main__":
    sys.exit(main())
