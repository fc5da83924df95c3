//! Chooses the files of one model in a repository: a folder of safetensors with its tokenizer, or one GGUF.
//!
//! The same rules apply to a hub's listing and to a snapshot in the cache.

use std::collections::BTreeMap;

/// The quantisations to choose from by default, best first: a balance of size and quality, then larger ones, then ones of
/// lower quality.
const PREFERRED: [&str; 16] = [
    "Q4_K_M", "Q8_0", "Q6_K", "Q5_K_M", "Q4_0", "Q4_1", "Q4_K_S", "Q5_K_S", "Q5_0", "Q5_1", "Q3_K_M", "Q3_K_S", "Q2_K",
    "BF16", "F16", "F32",
];

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum ChoiceError {
    #[error("no `{choice}` there; it has {}", list(.has))]
    NoSuchChoice { choice: String, has: Vec<String> },
    #[error("it has no GGUF files to choose `{0}` from")]
    NothingToChoose(String),
    #[error("it has neither safetensors with a config.json nor GGUF files")]
    NoModel,
    #[error("part {missing} of {count} of {name} is missing")]
    MissingPart { name: String, missing: u32, count: u32 },
}

/// The files of one model, as indices into `offered`.
#[derive(Debug, PartialEq, Eq)]
pub enum ChosenFiles {
    /// `config.json`, weights and tokenizer, in the root of the repository.
    Folder(Vec<usize>),
    /// The parts of one GGUF, first part first.
    Gguf(Vec<usize>),
}

impl ChosenFiles {
    pub fn files(&self) -> &[usize] {
        match self {
            Self::Folder(files) | Self::Gguf(files) => files,
        }
    }
}

/// Chooses from files given by name and size.
pub fn choose(offered: &[(&str, u64)], choice: Option<&str>) -> Result<ChosenFiles, ChoiceError> {
    let ggufs = GgufParts::all(offered);
    if let Some(choice) = choice {
        return named(&ggufs, choice)?.complete().map(ChosenFiles::Gguf);
    }
    if let Some(files) = folder(offered) {
        return Ok(ChosenFiles::Folder(files));
    }
    let preferred = PREFERRED.iter().find_map(|tag| ggufs.iter().find(|g| g.tag().eq_ignore_ascii_case(tag)));
    let smallest = || ggufs.iter().min_by_key(|g| g.bytes);
    preferred.or_else(smallest).ok_or(ChoiceError::NoModel)?.complete().map(ChosenFiles::Gguf)
}

/// The GGUF that `choice` names, by its file name or by the end of it.
fn named<'a, 'n>(ggufs: &'a [GgufParts<'n>], choice: &str) -> Result<&'a GgufParts<'n>, ChoiceError> {
    if ggufs.is_empty() {
        return Err(ChoiceError::NothingToChoose(choice.to_owned()));
    }
    // With `x-Q4_K_M.gguf` and `x-UD-Q4_K_M.gguf`, `Q4_K_M` names the first: the shortest name wins.
    let matching = ggufs.iter().filter(|g| g.is_named(choice)).min_by_key(|g| g.base.len());
    matching.ok_or_else(|| ChoiceError::NoSuchChoice {
        choice: choice.to_owned(),
        has: ggufs.iter().map(|g| g.tag().to_owned()).collect(),
    })
}

/// The files of a model in the Hugging Face format, if `offered` contains its configuration and weights.
fn folder(offered: &[(&str, u64)]) -> Option<Vec<usize>> {
    let has = |name: &str| offered.iter().any(|(n, _)| *n == name);
    if !has("config.json") {
        return None;
    }
    // Some repositories contain the weights twice, as `model*.safetensors` and in the publisher's own layout.
    let weights = |name: &str| {
        if has("model.safetensors") {
            name == "model.safetensors"
        } else if has("model.safetensors.index.json") {
            name == "model.safetensors.index.json" || (name.starts_with("model-") && name.ends_with(".safetensors"))
        } else {
            name.ends_with(".safetensors")
        }
    };
    let beside = |name: &str| {
        ["config.json", "generation_config.json", "chat_template.jinja", "chat_template.json"].contains(&name)
            || (name.starts_with("tokenizer") && name.ends_with(".json"))
    };
    let pick = |wanted: &dyn Fn(&str) -> bool| {
        let files = offered.iter().enumerate().filter(|(_, (name, _))| !name.contains('/') && wanted(name));
        files.map(|(index, _)| index).collect::<Vec<_>>()
    };
    if !pick(&weights).iter().any(|&index| offered[index].0.ends_with(".safetensors")) {
        return None;
    }
    Some(pick(&|name| weights(name) || beside(name)))
}

/// One GGUF of a repository, with all its parts.
#[derive(Debug)]
pub struct GgufParts<'a> {
    /// The file name without `.gguf` and without the part numbers of a split file.
    pub base: &'a str,
    pub bytes: u64,
    /// Index into `offered` by part number, from 1.
    parts: BTreeMap<u32, usize>,
    count: u32,
}

impl<'a> GgufParts<'a> {
    /// All GGUF models in `offered`, ordered by name. Vision projectors and importance matrices, which use the same
    /// container, are left out.
    pub fn all(offered: &[(&'a str, u64)]) -> Vec<Self> {
        let mut found: BTreeMap<(&str, u32), Self> = BTreeMap::new();
        for (index, &(name, bytes)) in offered.iter().enumerate() {
            let Some(stem) = name.strip_suffix(".gguf") else { continue };
            let own_name = stem.rsplit('/').next().unwrap_or(stem).to_ascii_lowercase();
            if own_name.contains("mmproj") || own_name.contains("imatrix") {
                continue;
            }
            let (base, part, count) = split_of(stem).unwrap_or((stem, 1, 1));
            let gguf = found.entry((base, count)).or_insert(Self { base, bytes: 0, parts: BTreeMap::new(), count });
            gguf.bytes = gguf.bytes.saturating_add(bytes);
            gguf.parts.insert(part, index);
        }
        found.into_values().collect()
    }

    /// The quantisation, such as `Q4_K_M`, from the end of the file name; the whole name if it has none.
    pub fn tag(&self) -> &'a str {
        let own_name = self.base.rsplit('/').next().unwrap_or(self.base);
        let starts = own_name.rmatch_indices(['-', '.']).map(|(at, _)| at + 1).chain([0]);
        let mut tag = None;
        for start in starts {
            let segment = own_name[start..].split(['-', '.']).next().unwrap_or_default();
            if is_quantisation(segment) {
                tag = Some(start);
            } else if let Some(tag) = tag {
                // `UD-Q4_K_XL` and `Q4_K_XL` are different quantisations.
                return if segment == "UD" { &own_name[start..] } else { &own_name[tag..] };
            }
        }
        tag.map_or(own_name, |start| &own_name[start..])
    }

    /// Whether one of its parts is this file.
    pub fn has(&self, offered: &[(&str, u64)], file: &str) -> bool {
        self.parts.values().any(|&index| offered[index].0 == file)
    }

    pub fn is_named(&self, choice: &str) -> bool {
        let choice = choice.strip_suffix(".gguf").unwrap_or(choice);
        let choice = split_of(choice).map_or(choice, |(base, _, _)| base);
        let Some(before) = self.base.len().checked_sub(choice.len()) else { return false };
        let Some(end) = self.base.get(before..) else { return false };
        let boundary = before == 0 || matches!(self.base.as_bytes()[before - 1], b'-' | b'.' | b'_' | b'/');
        boundary && end.eq_ignore_ascii_case(choice)
    }

    /// The indices of all parts, first part first.
    pub fn complete(&self) -> Result<Vec<usize>, ChoiceError> {
        // Iterates over the parts that exist instead of counting to `count`, which the publisher controls.
        let missing = (1..).zip(self.parts.keys()).find(|(part, key)| part != *key).map(|(part, _)| part);
        let missing = missing.or_else(|| {
            let have = self.parts.len() as u32;
            (have < self.count).then_some(have + 1)
        });
        match missing {
            None => Ok(self.parts.values().copied().collect()),
            Some(missing) => Err(ChoiceError::MissingPart { name: self.base.to_owned(), missing, count: self.count }),
        }
    }
}

/// The name that chooses one GGUF of several: its quantisation, or its file name where that names another one.
pub fn choice_of(ggufs: &[GgufParts<'_>], one: &GgufParts<'_>) -> String {
    match named(ggufs, one.tag()) {
        Ok(found) if (found.base, found.count) == (one.base, one.count) => one.tag().to_owned(),
        _ => format!("{}.gguf", one.base),
    }
}

/// `name-00002-of-00005` is part 2 of 5 of `name`.
pub fn split_of(stem: &str) -> Option<(&str, u32, u32)> {
    let (rest, count) = stem.rsplit_once("-of-")?;
    let (base, part) = rest.rsplit_once('-')?;
    let number = |digits: &str| {
        let five = digits.len() == 5 && digits.bytes().all(|b| b.is_ascii_digit());
        five.then(|| digits.parse::<u32>().ok()).flatten()
    };
    let (part, count) = (number(part)?, number(count)?);
    (1..=count).contains(&part).then_some((base, part, count))
}

pub fn is_quantisation(segment: &str) -> bool {
    let upper = segment.to_ascii_uppercase();
    let digit_after = |prefix: &str| {
        upper.strip_prefix(prefix).is_some_and(|rest| rest.bytes().next().is_some_and(|b| b.is_ascii_digit()))
    };
    ["Q", "IQ", "TQ", "MXFP", "NVFP"].iter().any(|prefix| digit_after(prefix))
        || ["F16", "F32", "BF16", "FP16", "FP32"].contains(&upper.as_str())
}

fn list(names: &[String]) -> String {
    const SHOWN_MAX: usize = 40;
    let mut text = names[..names.len().min(SHOWN_MAX)].join(", ");
    if names.len() > SHOWN_MAX {
        text.push_str(&format!(" and {} more", names.len() - SHOWN_MAX));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(names: &[&str], choice: Option<&str>, expected: &[&str]) {
        let offered: Vec<_> = names.iter().map(|name| (*name, 100 - name.len() as u64)).collect();
        let chosen = choose(&offered, choice).unwrap();
        let chosen: Vec<_> = chosen.files().iter().map(|&index| names[index]).collect();
        assert_eq!(chosen, expected);
    }

    #[test]
    fn a_safetensors_repository_gives_weights_and_text_files_only() {
        check(
            &[
                ".gitattributes",
                "README.md",
                "config.json",
                "generation_config.json",
                "merges.txt",
                "model.safetensors",
                "onnx/model.onnx",
                "original/consolidated.00.pth",
                "pytorch_model.bin",
                "special_tokens_map.json",
                "tokenizer.json",
                "tokenizer_config.json",
            ],
            None,
            &["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"],
        );
    }

    #[test]
    fn weights_that_are_there_twice_are_taken_once() {
        let shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];
        check(
            &["config.json", "consolidated.safetensors", shards[0], shards[1], "model.safetensors.index.json"],
            None,
            &["config.json", shards[0], shards[1], "model.safetensors.index.json"],
        );
    }

    #[test]
    fn the_default_gguf_is_the_usual_balance_of_size_and_quality() {
        check(&["a-Q2_K.gguf", "a-Q4_K_M.gguf", "a-Q8_0.gguf"], None, &["a-Q4_K_M.gguf"]);
        check(&["a.q2_k.gguf", "a.f16.gguf", "a.q8_0.gguf"], None, &["a.q8_0.gguf"]);
        check(&["mmproj-F16.gguf", "some-model.gguf"], None, &["some-model.gguf"]);
        check(&["config.json", "a-IQ1_S.gguf"], None, &["a-IQ1_S.gguf"]);
    }

    #[test]
    fn a_gguf_is_chosen_by_tag_or_by_file_name() {
        let names = ["m-Q4_K_M.gguf", "m-UD-Q4_K_M.gguf", "m-UD-Q4_K_XL.gguf", "BF16/m-BF16.gguf"];
        check(&names, Some("q4_k_m"), &["m-Q4_K_M.gguf"]);
        check(&names, Some("UD-Q4_K_M"), &["m-UD-Q4_K_M.gguf"]);
        check(&names, Some("Q4_K_XL"), &["m-UD-Q4_K_XL.gguf"]);
        check(&names, Some("m-UD-Q4_K_M.gguf"), &["m-UD-Q4_K_M.gguf"]);
        check(&names, Some("BF16"), &["BF16/m-BF16.gguf"]);
    }

    #[test]
    fn the_parts_of_a_split_gguf_stay_together() {
        let parts = ["q/m-Q8_0-00001-of-00002.gguf", "q/m-Q8_0-00002-of-00002.gguf"];
        check(&[parts[1], "m-Q2_K.gguf", parts[0]], None, &[parts[0], parts[1]]);
        check(&[parts[1], "m-Q2_K.gguf", parts[0]], Some("Q8_0"), &[parts[0], parts[1]]);
        check(&[parts[1], parts[0]], Some(parts[1]), &[parts[0], parts[1]]);
        let missing = ChoiceError::MissingPart { name: "q/m-Q8_0".into(), missing: 1, count: 2 };
        assert_eq!(choose(&[(parts[1], 1)], None), Err(missing));
        let missing = ChoiceError::MissingPart { name: "m".into(), missing: 2, count: 99999 };
        assert_eq!(choose(&[("m-00001-of-99999.gguf", 1)], None), Err(missing));
    }

    #[test]
    fn an_unknown_choice_tells_what_there_is() {
        let error = choose(&[("m-Q8_0.gguf", 1), ("m-UD-Q4_K_XL.gguf", 1)], Some("Q4_0")).unwrap_err();
        assert_eq!(error.to_string(), "no `Q4_0` there; it has Q8_0, UD-Q4_K_XL");
        assert_eq!(choose(&[("config.json", 1)], Some("Q4_0")), Err(ChoiceError::NothingToChoose("Q4_0".into())));
        assert_eq!(choose(&[("config.json", 1), ("x.bin", 1)], None), Err(ChoiceError::NoModel));
    }

    #[test]
    fn a_quantisation_that_names_two_files_is_no_name() {
        let names = ["a-Q8_0.gguf", "large-b-Q8_0.gguf", "a-Q4_0.gguf"];
        let ggufs = GgufParts::all(&names.map(|name| (name, 1)));
        let choices: Vec<_> = ggufs.iter().map(|one| choice_of(&ggufs, one)).collect();
        assert_eq!(choices, ["Q4_0", "Q8_0", "large-b-Q8_0.gguf"]);
    }

    #[test]
    fn tags_are_read_from_the_end_of_a_name() {
        for (name, tag) in [
            ("SmolLM2-135M-Instruct.Q4_1.gguf", "Q4_1"),
            ("qwen2.5-0.5b-instruct-q4_k_m.gguf", "q4_k_m"),
            ("x/Qwen3-8B-UD-Q4_K_XL.gguf", "UD-Q4_K_XL"),
            ("Q8_0.gguf", "Q8_0"),
            ("plain.gguf", "plain"),
        ] {
            assert_eq!(GgufParts::all(&[(name, 1)])[0].tag(), tag);
        }
    }
}
