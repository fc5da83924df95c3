//! `consort cluster key`: shows the key, for machines where nobody can type a code. Makes one if there is none.

use std::io::{IsTerminal, stdout};

use anyhow::Result;
use clap::Args;

use crate::cluster_key;
use crate::options::KeyOptions;
use crate::terminal;

/// Show the key of the cluster; make one if this machine has none
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
        let text = self.key.text_or_made(|_| {})?;
        terminal::print_line(text)?;
        if stdout().is_terminal() {
            let file = if self.key.is_given() { None } else { Some(cluster_key::kept_file()?) };
            let place = file.map_or_else(String::new, |file| format!("; it is kept in {}", file.display()));
            terminal::note(&format!("whoever has this key can use the machines of the cluster{place}"));
        }
        Ok(())
    }
}
