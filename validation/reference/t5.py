"""T5 encoders with random weights in transformers, as files that weft reads, and captions for them."""
import json

import sentencepiece
import torch
import transformers

from . import captions, safetensors_io

SMALL = {"d_model": 96, "d_kv": 16, "num_heads": 7, "d_ff": 200, "num_layers": 3}
REAL_LAYER = {"d_model": 4096, "d_kv": 64, "num_heads": 64, "d_ff": 10240, "num_layers": 1}


def model_of(shape, vocab_size, seed=3):
    """transformers' encoder of T5 v1.1 in f32, its weights of trained sizes: norms near 1, a bias that counts."""
    config = transformers.T5Config(vocab_size=vocab_size, feed_forward_proj="gated-gelu", tie_word_embeddings=False,
                                   dropout_rate=0.0, relative_attention_num_buckets=32,
                                   relative_attention_max_distance=128, **shape)
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    model = transformers.T5EncoderModel(config).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "layer_norm" in name:
                p.mul_(1 + 0.2 * torch.randn_like(p))
            elif "relative_attention_bias" in name:
                p.normal_(0, 1)
    return model


def write_weights(model, path):
    """Under the released names; the tied copy of the embedding left out."""
    tensors = {k: v.numpy() for k, v in model.state_dict().items() if k != "encoder.embed_tokens.weight"}
    safetensors_io.save(path, tensors)


def train_tokenizer(where, vocab_size=600, lines=None, **options):
    """A small SentencePiece model with T5's settings (unigram, nmt_nfkc, ids 0, 1, 2 for padding, </s>, unknown) at
    where/spiece.model."""
    (where / "train.txt").write_text("\n".join(lines or captions.captions(2000, 5)))
    sentencepiece.SentencePieceTrainer.train(
        input=str(where / "train.txt"), model_prefix=str(where / "spiece"), model_type="unigram", vocab_size=vocab_size,
        normalization_rule_name="nmt_nfkc", pad_id=0, eos_id=1, unk_id=2, bos_id=-1, hard_vocab_limit=False,
        minloglevel=2, **options)
    return sentencepiece.SentencePieceProcessor(model_file=str(where / "spiece.model"))


def deck(shape, vocab_size, **more):
    """The [t5] table of a deck."""
    values = {**shape, "vocab_size": vocab_size, **more}
    return "[t5]\n" + "".join(f"{k} = {json.dumps(v)}\n" for k, v in values.items())


def encode_padded(model, ids, length):
    """As Open-Sora calls it: every caption padded to `length`, the mask over real tokens. [captions, length, d_model]"""
    batch = torch.zeros(len(ids), length, dtype=torch.long)
    mask = torch.zeros(len(ids), length, dtype=torch.long)
    for i, one in enumerate(ids):
        batch[i, :len(one)] = torch.tensor(one)
        mask[i, :len(one)] = 1
    with torch.no_grad():
        return model(input_ids=batch.to(model.device), attention_mask=mask.to(model.device)).last_hidden_state
