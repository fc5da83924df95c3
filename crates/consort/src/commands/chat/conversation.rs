//! `Conversation`: the turns of a chat, and how the next answer is generated and printed.

use std::io::{self, Write, stdout};

use anyhow::Result;
use engine::{Engine, Executor};
use text::{GenerationDefaults, Message};
use types::TokenId;

use super::word_wrap::WordWrap;
use crate::generate::{GenerationEnd, generate};
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

    /// Answers the last turn. If that fails, the error is printed and the turn stays without an answer.
    fn answer(&mut self) -> Result<()> {
        let generated = self.prompt().and_then(|prompt| self.generate(prompt));
        match generated {
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

    fn generate(&mut self, prompt: Vec<TokenId>) -> Result<String> {
        let params = self.sampling.params(&self.text.defaults);
        let max = self.sampling.max_tokens;
        let mut out = stdout().lock();
        let mut wrap = terminal::stdout_width().map(WordWrap::new);
        let mut begun = false;
        let answer = generate(&mut self.engine, &self.text.tokenizer, prompt, params, max, |piece| {
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
    fn prompt(&mut self) -> Result<Vec<TokenId>> {
        let positions = self.engine.capacity().tokens_max();
        loop {
            let tokens = self.text.conversation(&messages(self.system.as_deref(), &self.turns))?;
            if tokens.len() <= positions - positions / ANSWER_CONTEXT_DIVISOR || self.turns.len() < 2 {
                return Ok(tokens);
            }
            terminal::note("(the conversation is too long: its oldest turn is forgotten)");
            self.turns.remove(0);
        }
    }
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
