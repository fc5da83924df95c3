//! `consort cluster invite`: shows a code with which one machine joins the cluster.

use std::net::SocketAddr;
use std::num::NonZeroU16;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Result;
use clap::Args;
use cluster::discovery::NodeName;
use net::invitation::{FailedTry, InvitationEnd, TryFailure};
use serde_json::{Value, json};
use server::InvitationSnapshot;

use crate::commands::join::host_name;
use crate::interrupt::{self, InterruptGuard};
use crate::invitations::{InvitationSettings, OpenInvitation, why_closed};
use crate::options::KeyOptions;
use crate::progress;
use crate::terminal;

/// How often the remaining time is shown, and Ctrl-C noticed.
const TICK: Duration = Duration::from_millis(200);
const MINUTES_MAX: u16 = 24 * 60;

/// Let a machine join the cluster with a code of six digits
///
/// Shows the code, and what to type on the other machine: `consort join`. The code is for one machine and for a few minutes; three
/// wrong ones end it, as Ctrl-C does. This machine gets a key if it has none.
#[derive(Args, Debug)]
pub struct InviteArgs {
    /// How long the code can be used
    #[arg(long, value_name = "MINUTES", default_value = "10", value_parser = minutes)]
    minutes: NonZeroU16,
    /// Print events as lines of JSON
    #[arg(long)]
    json: bool,
    /// Address to listen on [default: all addresses of this machine, port 7421 or any free one]
    #[arg(long, value_name = "ADDRESS:PORT")]
    listen: Option<SocketAddr>,
    /// Name of this machine, for people [default: its host name]
    #[arg(long, value_name = "NAME")]
    name: Option<NodeName>,
    /// Do not announce the invitation by mDNS; the other machine has to name this one
    #[arg(long)]
    no_mdns: bool,
    #[command(flatten)]
    key: KeyOptions,
}

impl InviteArgs {
    pub fn run(self) -> Result<ExitCode> {
        interrupt::install()?;
        let key = self.key.text_or_made(|file| {
            terminal::note(&format!("this machine has made a key for its cluster, in {}", file.display()));
        })?;
        let name = self.name.clone().map_or_else(host_name, Ok)?;
        let time = Duration::from_secs(u64::from(self.minutes.get()) * 60);
        let settings = InvitationSettings { key, name, listen: self.listen, time, is_announced: !self.no_mdns };
        let interrupt = InterruptGuard::new();
        let invitation = OpenInvitation::open(settings)?;
        self.tell_open(&invitation.snapshot(), &invitation)?;
        let spinner = (!self.json).then(|| progress::beside_log(progress::spinner("")));
        let mut told = 0;
        let end = loop {
            let happened = invitation.wait(told, TICK);
            for failed in &happened.failed[told..] {
                progress::suspend(|| self.tell_failed(failed))?;
            }
            told = happened.failed.len();
            if let Some(end) = happened.end {
                break end;
            }
            if interrupt.is_interrupted() {
                invitation.close();
            }
            let left = invitation.left().as_secs();
            spinner.iter().for_each(|spinner| {
                spinner.set_message(format!("waiting for a machine, {} min {:02} s left", left / 60, left % 60));
            });
        };
        spinner.iter().for_each(indicatif::ProgressBar::finish_and_clear);
        self.tell_end(&end)?;
        Ok(match end {
            Ok(InvitationEnd::Joined { .. }) => ExitCode::SUCCESS,
            Ok(InvitationEnd::Cancelled) => interrupt::EXIT_CODE.into(),
            _ => ExitCode::FAILURE,
        })
    }

    fn tell_open(&self, open: &InvitationSnapshot, invitation: &OpenInvitation) -> Result<()> {
        let addresses: Vec<_> = open.addresses.iter().map(|&ip| SocketAddr::new(ip, open.port).to_string()).collect();
        if self.json {
            return self.print(json!({
                "event": "open", "code": invitation.code().digits(), "name": open.name, "port": open.port,
                "addresses": addresses, "announced": open.is_announced, "seconds": u64::from(self.minutes.get()) * 60,
            }));
        }
        let minutes = if self.minutes.get() == 1 { "minute".to_owned() } else { format!("{} minutes", self.minutes) };
        let spaced: Vec<_> = invitation.code().to_string().chars().map(String::from).collect();
        let found = match (&addresses[..], open.is_announced) {
            ([], true) => String::new(),
            ([first, ..], true) => format!("\nWhere it does not find this machine: consort join {first}\n"),
            _ => String::new(),
        };
        let command = match (&addresses[..], open.is_announced) {
            ([first, ..], false) => format!("consort join {first}"),
            _ => "consort join".to_owned(),
        };
        let code = console::style(spaced.join(" ")).bold();
        terminal::print_line(format!(
            "For the next {minutes}, one machine can join with the code\n\n        {code}\n\nType on that machine:\n\n        \
             {command}\n{found}"
        ))?;
        Ok(())
    }

    fn tell_failed(&self, failed: &FailedTry) -> Result<()> {
        let FailedTry { address, name, failure, tries_left } = failed;
        let address = address.ip().to_canonical();
        if self.json {
            let event = match failure {
                TryFailure::WrongCode => "wrong_code",
                TryFailure::BrokenOff => "broken_off",
            };
            return self.print(
                json!({"event": event, "name": name, "address": address.to_string(), "tries_left": tries_left}),
            );
        }
        let what = match failure {
            TryFailure::WrongCode => "typed a wrong code",
            TryFailure::BrokenOff => "broke off, which may have been an attempt to guess the code",
        };
        let left = match tries_left {
            0 => "no try is left".to_owned(),
            1 => "one try is left".to_owned(),
            left => format!("{left} tries are left"),
        };
        terminal::note(&format!("{name} ({address}) {what}; {left}"));
        Ok(())
    }

    fn tell_end(&self, end: &Result<InvitationEnd, String>) -> Result<()> {
        if let Ok(InvitationEnd::Joined { address, name, is_confirmed }) = end {
            let address = address.ip().to_canonical();
            if self.json {
                let address = address.to_string();
                return self
                    .print(json!({"event": "joined", "name": name, "address": address, "confirmed": is_confirmed}));
            }
            let doubt = if *is_confirmed { "" } else { ", but did not confirm that it keeps the key" };
            terminal::print_line(format!("{name} ({address}) has joined{doubt}"))?;
            return Ok(());
        }
        let why = why_closed(end);
        match self.json {
            true => self.print(json!({"event": "closed", "reason": why})),
            false => {
                terminal::note(&format!("the invitation is closed: {why}"));
                Ok(())
            }
        }
    }

    fn print(&self, event: Value) -> Result<()> {
        Ok(terminal::print_line(event)?)
    }
}

fn minutes(text: &str) -> Result<NonZeroU16, String> {
    let number = text.parse().ok().filter(|minutes: &NonZeroU16| minutes.get() <= MINUTES_MAX);
    number.ok_or_else(|| format!("it must be a number from 1 to {MINUTES_MAX}"))
}
