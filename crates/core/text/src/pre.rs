//! The pre-tokenizers that GGUF files name in `tokenizer.ggml.pre`, and their rules.

/// How the text is split and normalised before merging, for a `gpt2` vocabulary.
pub(crate) struct PreTokenizer {
    names: &'static [&'static str],
    pub patterns: Patterns,
    /// A word that is a token as a whole is not merged from bytes.
    pub ignore_merges: bool,
    /// Whether to add a begin token if the file does not specify it.
    pub add_bos: bool,
    /// Whether text is normalised to NFC first.
    pub nfc: bool,
}

/// The pre-tokenizer with this name, if it is known.
pub(crate) fn by_name(name: &str) -> Option<&'static PreTokenizer> {
    TABLE.iter().find(|pre| pre.names.contains(&name))
}

/// All known names.
pub(crate) fn names() -> impl Iterator<Item = &'static str> {
    TABLE.iter().flat_map(|pre| pre.names.iter().copied())
}

type Patterns = &'static [&'static str];

const LLAMA3: Patterns = &[
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
];
const QWEN2: Patterns = &[
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
];
const QWEN35: Patterns = &[
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
];
pub(crate) const GPT2_PATTERN: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const GPT2: Patterns = &[GPT2_PATTERN];
const SMOLLM: Patterns = &[r"\p{N}", GPT2_PATTERN];
const FALCON: Patterns = &[r"[\p{P}\$\+<=>\^~\|`]+", GPT2_PATTERN, r"[0-9][0-9][0-9]"];
const DEFAULT: Patterns = &[r"[\p{P}\$\+<=>\^~\|]+", GPT2_PATTERN, r"\p{N}+", r"[0-9][0-9][0-9]"];
const DEEPSEEK_LLM: Patterns = &[
    r"[\r\n]",
    concat!(
        r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚ",
        r"\u{1E00}-\u{1F15}\u{1F18}-\u{1F1D}\u{1F20}-\u{1F45}\u{1F48}-\u{1F4D}\u{1F50}-\u{1F57}\u{1F59}\u{1F5B}\u{1F5D}",
        r"\u{1F5F}-\u{1F7D}\u{1F80}-\u{1FB4}\u{1FB6}-\u{1FBC}\u{1FBE}\u{1FC2}-\u{1FC4}\u{1FC6}-\u{1FCC}\u{1FD0}-\u{1FD3}",
        r"\u{1FD6}-\u{1FDB}\u{1FE0}-\u{1FEC}\u{1FF2}-\u{1FF4}\u{1FF6}-\u{1FFC}ℂℇℊ-ℓℕℙ-ℝℤ\u{2126}ℨ\u{212A}-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎ",
        r"ↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+"
    ),
    r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
    r"\s+$",
    r"[一-龥ࠀ-一가-퟿]+",
    r"\p{N}+",
];
const DEEPSEEK_CODER: Patterns = &[r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}"];
const DEEPSEEK3: Patterns = &[
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##,
];
const TEKKEN: Patterns = &[
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
];
const GPT4O: Patterns = &[
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
];
const YOUTU: Patterns = &[
    r"[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
];
const BLOOM: Patterns = &[r" ?[^(\s|.,!?…。，、।۔،)]+"];
const VIKING: Patterns = &[r" ?[^(\s|.,!?…。，、।۔،)]+", r"\p{N}"];
const BAILING: Patterns =
    &[r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"];
const SEED_CODER: Patterns = &[
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+",
];

const fn plain(names: &'static [&'static str], patterns: Patterns) -> PreTokenizer {
    PreTokenizer { names, patterns, ignore_merges: false, add_bos: false, nfc: false }
}

const TABLE: &[PreTokenizer] = &[
    plain(&["default", ""], DEFAULT),
    PreTokenizer {
        ignore_merges: true,
        add_bos: true,
        ..plain(&["llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"], LLAMA3)
    },
    plain(&["dbrx", "smaug-bpe", "glm4", "chatglm-bpe"], LLAMA3),
    PreTokenizer { nfc: true, ..plain(&["qwen2"], QWEN2) },
    plain(&["deepseek-r1-qwen", "kormo", "megrez", "stablelm2", "hunyuan", "grok-2", "solar-open"], QWEN2),
    PreTokenizer { nfc: true, ..plain(&["qwen35"], QWEN35) },
    plain(&["gpt-2", "phi-2", "mpt", "olmo", "jais", "gigachat", "a.x-4.0", "mellum", "modern-bert"], GPT2),
    plain(&["exaone4", "trillion", "granite-docling", "jina-es", "jina-de", "jina-v2-es", "jina-v2-de"], GPT2),
    plain(&["smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"], SMOLLM),
    plain(&["falcon"], FALCON),
    plain(&["deepseek-llm"], DEEPSEEK_LLM),
    plain(&["deepseek-coder"], DEEPSEEK_CODER),
    plain(&["deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"], DEEPSEEK3),
    PreTokenizer { ignore_merges: true, add_bos: true, ..plain(&["tekken"], TEKKEN) },
    plain(&["gpt-4o", "llama4", "kanana2", "minimax-m2", "talkie"], GPT4O),
    PreTokenizer { ignore_merges: true, ..plain(&["youtu"], YOUTU) },
    plain(&["bloom", "poro-chat", "gpt3-finnish"], BLOOM),
    plain(&["viking"], VIKING),
    plain(&["bailingmoe", "bailingmoe2", "llada-moe"], BAILING),
    plain(&["seed-coder"], SEED_CODER),
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::split::Splitter;

    #[test]
    fn every_named_pre_tokenizer_compiles_and_loses_no_text() {
        let text = "It's 12345 naïve\r\n\n  ÄÖ ß\t数学 。 don'T…x_y <b> हिन्दी 👍🏽  ";
        for name in names() {
            let pre = by_name(name).unwrap();
            let mut joined = String::new();
            Splitter::new(pre.patterns.iter().copied()).unwrap().split(text, &mut |word| joined += word).unwrap();
            assert_eq!(joined, text, "{name}");
        }
    }

    #[test]
    fn no_name_is_listed_twice() {
        let mut all: Vec<_> = names().collect();
        all.sort_unstable();
        assert!(all.windows(2).all(|pair| pair[0] != pair[1]));
    }
}
