//! `consort list`: the models in the store.

use std::io::{Write, stdout};

use anyhow::Result;
use clap::Args;
use indicatif::HumanBytes;
use serde_json::json;

use crate::store::Store;

/// List the models on this machine
#[derive(Args, Debug)]
pub struct ListArgs {
    /// Print one JSON object per line: name, bytes, complete, path
    #[arg(long)]
    json: bool,
}

impl ListArgs {
    pub fn run(self) -> Result<()> {
        let models = Store::from_environment()?.list()?;
        let mut out = stdout().lock();
        if self.json {
            for model in models {
                let path = model.path.display().to_string();
                let row = json!({"name": model.name, "bytes": model.bytes, "complete": model.complete, "path": path});
                writeln!(out, "{row}")?;
            }
            return Ok(());
        }
        if models.is_empty() {
            eprintln!("no models yet: `consort pull owner/name` fetches one, `consort run` the default one");
            return Ok(());
        }
        let width = models.iter().map(|model| model.name.len()).max().unwrap_or_default();
        writeln!(out, "{:width$}  {:>12}", "NAME", "SIZE")?;
        for model in models {
            let note = if model.complete { "" } else { "  incomplete: pull it again" };
            writeln!(out, "{:width$}  {:>12}{note}", model.name, HumanBytes(model.bytes).to_string())?;
        }
        Ok(())
    }
}
