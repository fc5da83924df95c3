//! `consort pull`: downloads a model into the store.

use std::io::{Write, stdout};

use anyhow::Result;
use clap::Args;

use crate::store::Store;

/// Download or update a model
///
/// Models are kept in the Hugging Face cache (HF_HOME, HF_HUB_CACHE). HF_TOKEN gives access to private and gated
/// repositories, HF_ENDPOINT sets another hub. An interrupted download is resumed. The name that is printed is the
/// one that every command and every API has for the model.
#[derive(Args, Debug)]
pub struct PullArgs {
    /// Name of the catalogue (qwen3:4b; `consort search` lists them), hub repository (owner/name), with :Q4_K_M or
    /// :FILE.gguf to choose a GGUF, or the URL of its page [default: the best that suits this machine]
    model: Option<String>,
}

impl PullArgs {
    pub fn run(self) -> Result<()> {
        let files = Store::from_environment()?.pull(self.model.as_deref())?;
        writeln!(stdout(), "{}\t{}", files.name, files.path.display())?;
        Ok(())
    }
}
