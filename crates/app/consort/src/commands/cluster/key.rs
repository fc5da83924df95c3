//! `consort cluster key`: shows the key, for machines where nobody can type a code.

use std::io::{IsTerminal, stdout};

use anyhow::{Result, bail};
use clap::Args;

use crate::cluster_key;
use crate::options::KeyOptions;
use crate::terminal;

/// Show the key of the cluster
///
/// Whoever has it can have the cluster's machines run layers. On another machine it goes into a file for --cluster-key-file;
/// where a person can type, `consort cluster invite` is simpler.
#[derive(Args, Debug)]
pub struct KeyArgs {
    #[command(flatten)]
    key: KeyOptions,
}

impl KeyArgs {
    pub fn run(self) -> Result<()> {
        let Some(text) = self.key.text_if_kept()? else {
            bail!(
                "this machine has no key yet: `consort cluster invite` and `consort serve MODEL --cluster` make one, `consort \
                 join` gets that of another machine"
            );
        };
        terminal::print_line(text)?;
        if stdout().is_terminal() {
            let file = if self.key.is_given() { None } else { Some(cluster_key::kept_file()?) };
            let place = file.map_or_else(String::new, |file| format!("; it is kept in {}", file.display()));
            terminal::note(&format!("whoever has this key can use the machines of the cluster{place}"));
        }
        Ok(())
    }
}
