//! `consort debug`: the logits or greedy tokens of a model for given token ids, for tests.

use std::fs::File;
use std::io::{BufWriter, Write, stdout};
use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::{Args, Subcommand};
use engine::{Engine, Executor, inspect};
use model::Checkpoint;
use types::TokenId;

use crate::model_config::{ModelConfig, RequestedCapacity};
use crate::options::{ModelOptions, ThreadOption};
use crate::store::ModelFiles;

/// Print what a model computes, for tests
#[derive(Args, Debug)]
pub struct DebugArgs {
    #[command(subcommand)]
    command: DebugCommand,
}

#[derive(Debug, Subcommand)]
enum DebugCommand {
    /// Write the logits of every position to a file: little-endian f32, [tokens, vocab]
    Logits {
        /// Output file
        #[arg(long)]
        out: PathBuf,
        #[command(flatten)]
        input: DebugInput,
    },
    /// Print the greedy continuation as a JSON array of token ids
    Tokens {
        /// Tokens to generate; end-of-sequence tokens do not stop the generation
        #[arg(long, default_value_t = 32)]
        max_tokens: usize,
        #[command(flatten)]
        input: DebugInput,
    },
}

#[derive(Args, Debug)]
struct DebugInput {
    /// Hub model (owner/name, owner/name:Q4_K_M), folder or .gguf file
    model: String,
    /// Token ids of the prompt, separated by commas
    #[arg(long, value_name = "IDS", required = true, value_delimiter = ',')]
    tokens: Vec<u32>,
    #[command(flatten)]
    threads: ThreadOption,
    #[command(flatten)]
    options: ModelOptions,
}

impl DebugArgs {
    pub fn run(self) -> Result<()> {
        match self.command {
            DebugCommand::Logits { input, out } => input.logits(&out),
            DebugCommand::Tokens { input, max_tokens } => input.greedy(max_tokens),
        }
    }
}

impl DebugInput {
    fn logits(&self, out: &PathBuf) -> Result<()> {
        let (config, files, checkpoint) = self.open()?;
        let (tokens, chunk) = (self.ids(), config.execution.chunk());
        let positions = config.execution.context(&checkpoint, tokens.len())?;
        let capacity = RequestedCapacity::full(1, positions, chunk.min(tokens.len()));
        let mut executor: Box<dyn Executor> = config.load(&files.path, &checkpoint, &self.threads, capacity)?;
        let file = File::create(out).with_context(|| format!("create {}", out.display()))?;
        let mut file = BufWriter::new(file);
        inspect::logits::<_, anyhow::Error>(&mut executor, &tokens, chunk, |row| {
            row.iter().try_for_each(|logit| file.write_all(&logit.to_le_bytes()))?;
            Ok(())
        })?;
        file.flush().with_context(|| format!("write {}", out.display()))
    }

    fn greedy(&self, tokens_max: usize) -> Result<()> {
        let (config, files, checkpoint) = self.open()?;
        let tokens = self.ids();
        let positions =
            config.execution.context(&checkpoint, tokens.len().saturating_add(tokens_max).saturating_add(1))?;
        let capacity = RequestedCapacity::full(1, positions, 1);
        let executor: Box<dyn Executor> = config.load(&files.path, &checkpoint, &self.threads, capacity)?;
        let mut engine = Engine::new(executor, config.execution.chunk());
        let answer = inspect::greedy(&mut engine, &tokens, tokens_max)?;
        let ids: Vec<u32> = answer.iter().map(|token| token.0).collect();
        writeln!(stdout(), "{}", serde_json::to_string(&ids)?)?;
        Ok(())
    }

    fn open(&self) -> Result<(ModelConfig, ModelFiles, Checkpoint)> {
        let config = ModelConfig::new(&self.options)?;
        let files = config.resolve(Some(&self.model))?;
        let checkpoint = Checkpoint::open(&files.path).context("open the model")?;
        Ok((config, files, checkpoint))
    }

    fn ids(&self) -> Vec<TokenId> {
        self.tokens.iter().copied().map(TokenId).collect()
    }
}
