//! How a machine without a key gets one: it finds an invitation, a person types the code, and the key is kept.

use std::io::{IsTerminal, Write, stderr, stdin};
use std::net::{SocketAddr, ToSocketAddrs};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use cluster::discovery::{FoundInvitation, Interfaces, MDNS_PORT, NodeName, find_invitations};
use net::invitation::{INVITATION_PORT, InvitationCode, JoinError, ReceivedKey, accept_invitation};
use net::{PeerAddress, WaitLimit};

use crate::cluster_key;
use crate::progress;
use crate::terminal;
use crate::usage::UsageError;

/// How long further invitations may take to be found after the first one.
const SETTLE: Duration = Duration::from_secs(1);
/// How long one address may take: another machine may be served before.
const EXCHANGE: Duration = Duration::from_secs(25);
/// The longest line that a person types.
const LINE_BYTES_MAX: u64 = 256;

/// `HOST` or `HOST:PORT`.
pub fn invitation_address(text: &str) -> Result<PeerAddress, String> {
    let with_port = match text.parse::<std::net::Ipv6Addr>() {
        Ok(address) => format!("[{address}]:{INVITATION_PORT}"),
        Err(_) if text.contains(':') => text.to_owned(),
        Err(_) => format!("{text}:{INVITATION_PORT}"),
    };
    with_port.parse().map_err(|_| format!("`{text}` is no address: write HOST or HOST:PORT"))
}

/// Gets the key of a cluster by a code, and keeps it. `given` is where the invitation is open; `None`: it is looked for.
pub fn join_by_code(given: Option<&PeerAddress>, name: &NodeName, no_mdns: bool) -> Result<String> {
    if !stdin().is_terminal() || !stderr().is_terminal() {
        return Err(UsageError::new(
            "this machine has no key of a cluster: run `consort join` in a terminal, which asks for the code that `consort \
             cluster invite` shows on a machine of the cluster; or give the key by --cluster-key-file or CONSORT_CLUSTER_KEY",
        )
        .into());
    }
    let invitation = match given {
        Some(address) => ChosenInvitation { name: address.to_string(), addresses: vec![address.clone()] },
        None if no_mdns => {
            return Err(
                UsageError::new("--no-mdns finds no invitation: name its machine, as `consort join HOST`").into()
            );
        }
        None => find()?,
    };
    let received = ask_for_code(&invitation, name)?;
    let file = cluster_key::keep(&received.text)?;
    let (text, inviter) = (received.text.clone(), received.inviter.clone());
    // The key is here, whether the other machine learns that or not.
    let _ = received.confirm(&WaitLimit::until(Instant::now() + EXCHANGE));
    terminal::note(&format!("{inviter} has let this machine in; the key of the cluster is in {}", file.display()));
    Ok(text)
}

struct ChosenInvitation {
    name: String,
    addresses: Vec<PeerAddress>,
}

/// Looks for invitations until there is one. If there are several, a person chooses.
fn find() -> Result<ChosenInvitation> {
    let spinner =
        progress::spinner("looking for an invitation: run `consort cluster invite` on a machine of the cluster");
    let mut first_at = None;
    let is_enough = |found: &[FoundInvitation], waited: Duration| {
        if found.is_empty() {
            first_at = None;
            return false;
        }
        waited.saturating_sub(*first_at.get_or_insert(waited)) >= SETTLE
    };
    let found = find_invitations(&Interfaces::default(), MDNS_PORT, is_enough);
    spinner.finish_and_clear();
    let found = found.context("look for an invitation: name its machine, as `consort join HOST`")?;
    let chosen = if found.len() == 1 { 0 } else { choose(&found)? };
    let FoundInvitation { name, addresses, .. } = found.into_iter().nth(chosen).context("it is one of them")?;
    Ok(ChosenInvitation { name: format!("{name} ({})", addresses[0]), addresses })
}

fn choose(found: &[FoundInvitation]) -> Result<usize> {
    terminal::note("several machines of this network invite:");
    for (number, invitation) in (1..).zip(found) {
        terminal::note(&format!("  {number}  {} ({})", invitation.name, invitation.addresses[0]));
    }
    loop {
        let line = ask(&format!("which one, 1 to {}? ", found.len()))?;
        match line.parse::<usize>() {
            Ok(number) if (1..=found.len()).contains(&number) => return Ok(number - 1),
            _ => terminal::note("(type its number)"),
        }
    }
}

/// Asks until the code is right, or the other machine takes no more.
fn ask_for_code(invitation: &ChosenInvitation, name: &NodeName) -> Result<ReceivedKey> {
    let from = &invitation.name;
    loop {
        let line = ask(&format!("code that {from} shows: "))?;
        let code: InvitationCode = match line.parse() {
            Ok(code) => code,
            Err(error) => {
                terminal::note(&format!("({error})"));
                continue;
            }
        };
        match exchange(invitation, &code, name) {
            Ok(received) => return Ok(received),
            Err(error @ JoinError::WrongCode { tries_left: 1.. }) => terminal::note(&format!("({error})")),
            Err(error) => return Err(error).with_context(|| format!("join by the invitation of {from}")),
        }
    }
}

/// Tries the addresses of a machine, until one answers.
fn exchange(invitation: &ChosenInvitation, code: &InvitationCode, name: &NodeName) -> Result<ReceivedKey, JoinError> {
    let mut last = JoinError::NotOpen;
    for address in invitation.addresses.iter().flat_map(resolve) {
        let limit = WaitLimit::until(Instant::now() + EXCHANGE);
        match accept_invitation(address, code, name.as_str(), &limit) {
            Err(error @ (JoinError::NotOpen | JoinError::Io(_))) => last = error,
            done => return done,
        }
    }
    Err(last)
}

fn resolve(address: &PeerAddress) -> Vec<SocketAddr> {
    address.as_str().to_socket_addrs().map_or_else(|_| Vec::new(), |addresses| addresses.take(4).collect())
}

/// A line that is typed, without white space around it.
fn ask(prompt: &str) -> Result<String> {
    use std::io::{BufRead as _, Read as _};
    let mut err = stderr();
    err.write_all(terminal::printable(prompt).as_bytes())
        .and_then(|()| err.flush())
        .context("write to the terminal")?;
    let mut line = String::new();
    let read = stdin().lock().take(LINE_BYTES_MAX).read_line(&mut line).context("read from the terminal")?;
    if read == 0 {
        bail!("no code was typed");
    }
    Ok(line.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_invitation_is_named_by_its_host_with_or_without_a_port() {
        let text = |text| invitation_address(text).map(|address| address.to_string());
        for (given, expected) in [
            ("10.0.0.5", "10.0.0.5:7421"),
            ("kitchen.local", "kitchen.local:7421"),
            ("kitchen:80", "kitchen:80"),
            ("fe80::1", "[fe80::1]:7421"),
            ("[::1]:80", "[::1]:80"),
        ] {
            assert_eq!(text(given).as_deref(), Ok(expected));
        }
        for wrong in ["", "a b", "kitchen:", "kitchen:0", "::1:80:"] {
            assert!(text(wrong).is_err(), "{wrong}");
        }
    }
}
