//! `consort pull`: a model into the store, ahead of its use.

use std::io::{Write, stdout};

use anyhow::Result;
use clap::Args;

use crate::store::Store;

/// Download a model, or bring it up to date
///
/// Models are kept in the Hugging Face cache (HF_HOME, HF_HUB_CACHE). HF_TOKEN opens private and gated repositories,
/// HF_ENDPOINT names another hub. A download that was cut off goes on where it stopped.
#[derive(Args, Debug)]
pub struct PullArgs {
    /// A hub repository (owner/name), with :Q4_K_M or :FILE.gguf to choose a GGUF; none is the default model
    model: Option<String>,
}

impl PullArgs {
    pub fn run(self) -> Result<()> {
        let files = Store::from_environment()?.pull(self.model.as_deref())?;
        writeln!(stdout(), "{}\t{}", files.name, files.path.display())?;
        Ok(())
    }
}
