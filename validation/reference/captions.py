"""Captions for checks: the original's cleaning, written from docs/models/t5.md, Cleaning, with the libraries
that it uses, and a generator of captions that give it something to do."""
import html
import random
import re
import urllib.parse

import bs4
import ftfy

ADDRESS = r"\b((?:{}:(?:\/{{1,3}}|[a-zA-Z0-9%])|[a-zA-Z0-9.\-]+[.](?:com|co|ru|net|org|edu|gov|it)[\w/-]*\b\/?(?!@)))"
DASHES = ("-\u058a\u05be\u1400\u1806\u2010-\u2015\u2e17\u2e1a\u2e3a\u2e3b\u2e40\u301c\u3030\u30a0\ufe31\ufe32\ufe58"
          "\ufe63\uff0d")
FILES = "(?:png|jpg|jpeg|bmp|webp|eps|pdf|apk|mp4)"

# (expression, replacement), in order.
BEFORE_HTML = [("<person>", "person"), (ADDRESS.format("https?"), ""), (ADDRESS.format("www"), "")]
MARKS = [(r"@[\w\d]+\b", ""), (r"[\u31c0-\u31ef]+", ""), (r"[\u31f0-\u31ff]+", ""), (r"[\u3200-\u32ff]+", ""),
         (r"[\u3300-\u33ff]+", ""), (r"[\u3400-\u4dbf]+", ""), (r"[\u4dc0-\u4dff]+", ""), (r"[\u4e00-\u9fff]+", ""),
         (f"[{re.escape(DASHES[0])}{DASHES[1:]}]+", "-"), ("[`´«»“”¨]", '"'), ("[‘’]", "'"), ("&quot;?", ""),
         ("&amp", ""), (r"\d{1,3}\.\d{1,3}\.\d{1,3}\.\d{1,3}", " "), (r"\d:\d\d\s+$", ""), (r"\\n", " "),
         (r"#\d{1,3}\b", ""), (r"#\d{5,}\b", ""), (r"\b\d{6,}\b", ""), (r"[\S]+\." + FILES, ""),
         (r"[\"\']{2,}", '"'), (r"[\.]{2,}", " "), (r"[#®•©™&@·º½¾¿¡§~)(\]\[}{|\\/*]+", " "), (r"\s+\.\s+", " ")]
RUBBISH = [(r"\b[a-zA-Z]{1,3}\d{3,15}\b", ""), (r"\b[a-zA-Z]+\d+[a-zA-Z]+\b", ""), (r"\b\d+[a-zA-Z]+\d+\b", ""),
           (r"(worldwide\s+)?(free\s+)?shipping", ""), (r"(free\s)?download(\sfree)?", ""),
           (r"\bclick\b\s(?:for|on)\s\w+", ""), (r"\b" + FILES + r"(\simage[s]?)?", ""), (r"\bpage\s+\d+\b", ""),
           (r"\b\d*[a-zA-Z]+\d+[a-zA-Z]+\d+[a-zA-Z\d]*\b", " "), (r"\b\d+\.?\d*[xх×]\d+\.?\d*\b", ""),
           (r"\b\s+\:\s+", ": "), (r"(\D[,\./])\b", r"\1 "), (r"\s+", " "), (r"^[\"\']([\w\W]+)[\"\']$", r"\1"),
           (r"^[\'\_,\-\:;]", ""), (r"[\'\_,\-\:\-\+]$", ""), (r"^\.\S+$", "")]


def apply(steps, text):
    for expression, replacement in steps:
        text = re.sub(expression, replacement, text)
    return text


def clean_caption(text):
    text = urllib.parse.unquote_plus(str(text)).strip().lower()
    text = apply(BEFORE_HTML, text)
    text = bs4.BeautifulSoup(text, features="html.parser").text
    text = apply(MARKS, text)
    if len(re.findall(r"[-_]", text)) > 3:
        text = re.sub(r"[-_]", " ", text)
    text = html.unescape(html.unescape(ftfy.fix_text(text))).strip()
    return apply(RUBBISH, text).strip()


def clean_text(text):
    return clean_caption(clean_caption(text))


def clean_basic(text):
    """As Wan's tokenizer does with clean="whitespace"."""
    text = html.unescape(html.unescape(ftfy.fix_text(text))).strip()
    return re.sub(r"\s+", " ", text).strip()


WORDS = ("a the drone shot of waterfall cliff ocean sunset city street cat dog slowly pans left aerial view cinematic 4k "
         "camera moves through forest woman walks umbrella rain snow mountain naïve café straße Ærø İstanbul ΟΔΟΣ Москва "
         "東京 你好 한국어 שלום مرحبا हिन्दी 🔥 ★ № ½ €5 £20 ¥300 it's don't l'eau rock'n'roll mother-in-law snake_case").split()
ODDITIES = ("https://example.com/x?y=1 www.foo.org http://a.ru/b_c foo.com/bar you@mail.com @nick #123 #12345 1234567 "
            "192.168.0.1 3:45 12:30 file.jpg IMG_001.png page 12|free shipping|worldwide free shipping|download free|"
            "click for more|click on this|png images|jc6640 jc6640vc 6640vc231 a1b2c3d 10x20 3.5x4 20×30 5х6 100% +1 50%20off "
            "%E4%BD%A0 caf%C3%A9 %FF \\n &amp; &lt;b&gt; &eacute; &#39; &#8217; &nbsp; &copy &quot; &unknown; <b>bold</b> "
            "<br/> <person> <3 a<b x>y <!-- c --> <p class='q'>text</p> <script>x</script> <i>open “q” ‘s’ «g» „low“ `b` ´ ¨ "
            "... .. — – ‐ ― ~ (x) [y] {z} a|b c/d * ** § © ® ™ • · º ¿que? ¡hola! ' '' \" \"\" , ; : - _ . + 6.5. 10.0. a.b "
            "word,word end. ﬁ ﬀ ĳ ＦＵＬＬ １２ ｶﾅ e\u0301 n\u0303 \u200b \u00a0 \u3000 \u2009 \ufeff \x07 \u00ad ſ").replace(" ", "|")
ODDITIES = [o for o in ODDITIES.split("|") if o]
# What UTF-8 looks like to who takes it for Windows-1252.
MOJIBAKE = "â€œ â€\u009d â€¦ â€“ â€™ Ã© Ã¶ Ã± Â© Â° Ã  la cafÃ© Ã¼ber ðŸ˜€ å¤ª ã\u0081‚ \u0093x\u0094".split(" ")


def caption(rng, broken=False):
    parts = []
    for _ in range(rng.randint(1, 14)):
        kind = rng.random()
        if broken and kind < 0.15:
            parts.append(rng.choice(MOJIBAKE))
        else:
            parts.append(rng.choice(ODDITIES if kind < 0.5 else WORDS))
        if rng.random() < 0.1:
            parts[-1] = parts[-1].upper()
    text = parts[0]
    for part in parts[1:]:
        text += rng.choice([" ", " ", " ", " ", "  ", ", ", ". ", "", "-", " : "]) + part
    return text


def captions(n, seed, broken=False):
    rng = random.Random(seed)
    return [caption(rng, broken) for _ in range(n)]
