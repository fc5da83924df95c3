//! `Conversation`: the turns of a chat, and how the next answer is generated and printed.

use std::io::{self, Write, stdout};

use anyhow::{Result, ensure};
use engine::{Engine, Executor};
use text::{EncodeError, GenerationDefaults, Message, TemplateError};
use types::TokenId;

use super::word_wrap::WordWrap;
use crate::generate::{GenerationEnd, generate};
use crate::interrupt::InterruptGuard;
use crate::sampling::SamplingOptions;
use crate::stats::StatsOption;
use crate::terminal;
use crate::text_assets::TextAssets;

/// One part in this many of the context is reserved for the answer.
const ANSWER_CONTEXT_DIVISOR: usize = 4;

pub struct Conversation<E: Executor> {
    engine: Engine<E>,
    text: TextAssets,
    stats: StatsOption,
    pub sampling: SamplingOptions,
    pub system: Option<String>,
    /// Only the last one may be without an answer, if it could not be generated.
    pub turns: Vec<Turn>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Turn {
    pub user: String,
    pub assistant: Option<String>,
}

impl<E: Executor> Conversation<E> {
    pub fn new(
        engine: Engine<E>,
        text: TextAssets,
        sampling: SamplingOptions,
        stats: StatsOption,
        system: Option<String>,
    ) -> Self {
        Self { engine, text, stats, sampling, system, turns: Vec::new() }
    }

    /// The model's own sampling settings.
    pub fn defaults(&self) -> &GenerationDefaults {
        &self.text.defaults
    }

    /// One turn: sends the user's message and prints the answer as it is generated.
    pub fn say(&mut self, message: &str) -> Result<()> {
        self.turns.pop_if(|last| last.assistant.is_none());
        self.turns.push(Turn { user: message.to_owned(), assistant: None });
        self.answer()
    }

    /// Answers the last message again.
    pub fn retry(&mut self) -> Result<()> {
        let Some(last) = self.turns.last_mut() else {
            terminal::note("(there is no message to answer)");
            return Ok(());
        };
        last.assistant = None;
        self.answer()
    }

    /// Answers the last turn. If that fails, the error is printed and the turn stays without an answer. Ctrl-C ends the
    /// answer, also while its prompt is rendered, and not the chat.
    fn answer(&mut self) -> Result<()> {
        let interrupt = InterruptGuard::new();
        let prompt = self.prompt(&interrupt);
        if interrupt.is_interrupted() {
            terminal::note("(interrupted)");
            return Ok(());
        }
        match prompt.and_then(|prompt| self.generate(prompt, &interrupt)) {
            Ok(text) => {
                if let Some(last) = self.turns.last_mut() {
                    last.assistant = Some(text);
                }
                Ok(())
            }
            Err(error) if error.is::<io::Error>() => Err(error),
            Err(error) => {
                terminal::error(&error);
                Ok(())
            }
        }
    }

    fn generate(&mut self, prompt: Vec<TokenId>, interrupt: &InterruptGuard) -> Result<String> {
        let params = self.sampling.params(&self.text.defaults);
        let max = self.sampling.max_tokens;
        let mut out = stdout().lock();
        let mut wrap = terminal::stdout_width().map(WordWrap::new);
        let mut begun = false;
        let answer = generate(&mut self.engine, &self.text.tokenizer, prompt, params, max, interrupt, |piece| {
            begun = true;
            let piece = terminal::for_stdout(piece);
            match &mut wrap {
                Some(wrap) => out.write_all(wrap.push(&piece).as_bytes())?,
                None => out.write_all(piece.as_bytes())?,
            }
            Ok(out.flush()?)
        });
        if let Some(wrap) = &mut wrap {
            out.write_all(wrap.finish().as_bytes())?;
        }
        if begun || answer.is_ok() {
            writeln!(out)?;
        }
        let answer = answer?;
        self.print_ending(answer.ending);
        self.stats.print(&answer.timings);
        Ok(answer.text)
    }

    /// Tells why an answer is not complete.
    fn print_ending(&self, ending: GenerationEnd) {
        match ending {
            GenerationEnd::Stop => {}
            GenerationEnd::Cancelled => terminal::note("(interrupted)"),
            GenerationEnd::MaxTokens => {
                let max = self.sampling.max_tokens.unwrap_or_default();
                terminal::note(&format!("(cut off: max_tokens is {max})"));
            }
            GenerationEnd::ContextFull => {
                let context = self.engine.capacity().tokens_max();
                terminal::note(&format!("(cut off: the context of {context} tokens is full)"));
            }
        }
    }

    /// The tokens of the conversation. If they leave too little of the context for an answer, the oldest turns are removed.
    fn prompt(&mut self, interrupt: &InterruptGuard) -> Result<Vec<TokenId>> {
        let positions = self.engine.capacity().tokens_max();
        let tokens_max = positions - positions / ANSWER_CONTEXT_DIVISOR;
        let render = |first: usize| {
            ensure!(!interrupt.is_interrupted(), "interrupted");
            self.text.conversation(&messages(self.system.as_deref(), &self.turns[first..]))
        };
        let (first, tokens) = fit(self.turns.len(), tokens_max, render)?;
        if first > 0 {
            let oldest = if first == 1 { "turn is".to_owned() } else { format!("{first} turns are") };
            terminal::note(&format!("(the conversation is too long: its oldest {oldest} forgotten)"));
            self.turns.drain(..first);
        }
        Ok(tokens)
    }
}

/// The first turn of the longest end of a conversation that has at most `tokens_max` tokens, and its prompt. If none has,
/// the last turn. `render` makes the prompt from a first turn on. It is called seldom, because it takes long for many turns.
fn fit(
    turns: usize,
    tokens_max: usize,
    mut render: impl FnMut(usize) -> Result<Vec<TokenId>>,
) -> Result<(usize, Vec<TokenId>)> {
    let (mut first, mut end) = (0, turns.saturating_sub(1));
    let mut middle = 0;
    let mut fitting = None;
    while first < end {
        match render(middle) {
            Ok(tokens) if tokens.len() <= tokens_max => (end, fitting) = (middle, Some(tokens)),
            Err(error) if !is_too_long(&error) => return Err(error),
            _ => first = middle + 1,
        }
        middle = first.midpoint(end);
    }
    let tokens = fitting.map_or_else(|| render(end), Ok)?;
    Ok((end, tokens))
}

/// Whether fewer turns may succeed.
fn is_too_long(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(TemplateError::Exceeded(_)))
        || matches!(error.downcast_ref(), Some(EncodeError::TooLong { .. }))
}

/// A conversation as a chat template and as a file have it.
pub fn messages(system: Option<&str>, turns: &[Turn]) -> Vec<Message> {
    let system = system.map(|text| Message::new("system", text));
    let turns = turns.iter().flat_map(|turn| {
        let assistant = turn.assistant.as_ref().map(|text| Message::new("assistant", text));
        [Message::new("user", &turn.user)].into_iter().chain(assistant)
    });
    system.into_iter().chain(turns).collect()
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use anyhow::bail;

    use super::*;

    /// Each turn has one token, and more than `possible` turns exceed the limits of the template.
    fn check(turns: usize, tokens_max: usize, possible: usize, expected: usize) {
        let calls = Cell::new(0);
        let render = |first: usize| {
            calls.set(calls.get() + 1);
            if turns - first > possible {
                bail!(TemplateError::Exceeded("it takes more than 7 steps".to_owned()));
            }
            Ok(vec![TokenId(0); turns - first])
        };
        let (first, tokens) = fit(turns, tokens_max, render).unwrap();
        assert_eq!((first, tokens.len()), (expected, turns - expected), "{turns} turns");
        assert!(calls.get() <= 12, "{} renderings of {turns} turns", calls.get());
    }

    #[test]
    fn as_few_turns_as_possible_are_forgotten_but_never_the_last() {
        check(1, 10, 10, 0);
        check(1, 0, 10, 0);
        check(10, 10, 10, 0);
        check(11, 10, 100, 1);
        check(1000, 10, 1000, 990);
        check(1000, 10, 500, 990);
        check(1000, 100, 7, 993);
        check(1000, 0, 7, 999);
    }

    #[test]
    fn other_errors_and_a_last_turn_that_is_too_long_are_told() {
        let refuse = |_| bail!(TemplateError::Refused("no".to_owned()));
        assert!(fit(9, 10, refuse).unwrap_err().to_string().contains("refuses"));
        let exceed = |_| bail!(TemplateError::Exceeded("no".to_owned()));
        assert!(fit(9, 10, exceed).unwrap_err().to_string().contains("exceeds"));
    }
}
