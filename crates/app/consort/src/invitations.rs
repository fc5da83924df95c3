//! Open invitations of this machine: the listener, its announcement, and what has become of them. See `net::invitation`.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use cluster::discovery::{Interfaces, InvitationAnnouncer, MDNS_PORT, NodeName};
use net::WaitLimit;
use net::invitation::{FailedTry, INVITATION_PORT, Invitation, InvitationCode, InvitationEnd, TRIES_MAX};
use server::{InvitationSnapshot, InvitationState, Inviter};
use tracing::{info, warn};

/// How long an invitation of the server's page is open.
const TIME_DEFAULT: Duration = Duration::from_secs(10 * 60);

pub struct InvitationSettings {
    /// The text of the cluster's key.
    pub key: String,
    /// Of this machine.
    pub name: NodeName,
    /// `None`: every address, on the port of invitations, or on another one if that is taken.
    pub listen: Option<SocketAddr>,
    pub time: Duration,
    pub is_announced: bool,
}

/// An invitation, until it is dropped.
pub struct OpenInvitation {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    name: NodeName,
    code: InvitationCode,
    port: u16,
    addresses: Vec<IpAddr>,
    is_announced: bool,
    expires: Instant,
    is_closed: AtomicBool,
    progress: Mutex<Progress>,
    changed: Condvar,
}

/// What has happened.
#[derive(Clone, Default)]
pub struct Progress {
    pub failed: Vec<FailedTry>,
    /// An error is for people.
    pub end: Option<Result<InvitationEnd, String>>,
}

impl OpenInvitation {
    pub fn open(settings: InvitationSettings) -> Result<Self> {
        let InvitationSettings { key, name, listen, time, is_announced } = settings;
        let listener = bind(listen)?;
        let address = listener.local_addr().context("open an invitation")?;
        let code = InvitationCode::random().context("make a code")?;
        let invitation = Invitation::new(code.clone(), &key, name.as_str())?;
        let announcer =
            if is_announced && !address.ip().is_loopback() { announce(&name, address.port()) } else { None };
        let shared = Arc::new(Shared {
            name,
            code,
            port: address.port(),
            addresses: addresses(address.ip()),
            is_announced: announcer.is_some(),
            expires: Instant::now() + time,
            is_closed: AtomicBool::new(false),
            progress: Mutex::default(),
            changed: Condvar::new(),
        });
        let own = Arc::clone(&shared);
        let serve = move || {
            let is_closed = || own.is_closed.load(Ordering::Relaxed);
            let limit = WaitLimit::new(Some(own.expires), &is_closed);
            let end = invitation.serve(&listener, &limit, |failed| own.add(|progress| progress.failed.push(failed)));
            // Nobody is to find a listener that is closed.
            drop((listener, announcer));
            let end = end.map_err(|error| format!("its listener failed: {error}"));
            own.add(|progress| progress.end = Some(end));
        };
        let thread = thread::Builder::new().name("invitation".to_owned()).spawn(serve).context("start a thread")?;
        Ok(Self { shared, thread: Some(thread) })
    }

    pub fn code(&self) -> &InvitationCode {
        &self.shared.code
    }

    /// Waits until more has happened than so many failed tries, for `wait` at most.
    pub fn wait(&self, failed: usize, wait: Duration) -> Progress {
        let is_old = |progress: &mut Progress| progress.failed.len() <= failed && progress.end.is_none();
        let waited = self.shared.changed.wait_timeout_while(self.shared.lock(), wait, is_old);
        waited.unwrap_or_else(PoisonError::into_inner).0.clone()
    }

    pub fn left(&self) -> Duration {
        self.shared.expires.saturating_duration_since(Instant::now())
    }

    pub fn close(&self) {
        self.shared.is_closed.store(true, Ordering::Relaxed);
    }

    pub fn snapshot(&self) -> InvitationSnapshot {
        let Shared { name, code, port, addresses, is_announced, .. } = &*self.shared;
        let Progress { failed, end } = self.shared.lock().clone();
        let state = match end {
            None => InvitationState::Open { code: code.digits(), seconds_left: self.left().as_secs() },
            Some(Ok(InvitationEnd::Joined { address, name, .. })) => {
                InvitationState::Joined { name, address: address.ip().to_canonical().to_string() }
            }
            Some(end) => InvitationState::Closed { why: why_closed(&end) },
        };
        InvitationSnapshot {
            name: name.to_string(),
            port: *port,
            addresses: addresses.clone(),
            is_announced: *is_announced,
            tries_left: failed.last().map_or(TRIES_MAX, |last| last.tries_left),
            state,
        }
    }
}

impl Drop for OpenInvitation {
    fn drop(&mut self) {
        self.close();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn add(&self, change: impl FnOnce(&mut Progress)) {
        change(&mut self.lock());
        self.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Why an invitation is closed, for people.
pub fn why_closed(end: &Result<InvitationEnd, String>) -> String {
    match end {
        Ok(InvitationEnd::Joined { name, .. }) => format!("{name} has joined"),
        Ok(InvitationEnd::TooManyTries) => format!("{TRIES_MAX} exchanges failed, so a code may have been guessed at"),
        Ok(InvitationEnd::Expired) => "its time is over".to_owned(),
        Ok(InvitationEnd::Cancelled) => "it was closed here".to_owned(),
        Err(why) => why.clone(),
    }
}

fn bind(listen: Option<SocketAddr>) -> Result<TcpListener> {
    let any = |port| SocketAddr::from((Ipv4Addr::UNSPECIFIED, port));
    let bound = match listen {
        Some(address) => TcpListener::bind(address).with_context(|| format!("listen on {address}"))?,
        None => TcpListener::bind(any(INVITATION_PORT))
            .or_else(|_| TcpListener::bind(any(0)))
            .context("listen for a machine that is invited")?,
    };
    Ok(bound)
}

fn announce(name: &NodeName, port: u16) -> Option<InvitationAnnouncer> {
    let announced = InvitationAnnouncer::start(name, port, &Interfaces::default(), MDNS_PORT);
    announced.inspect_err(|error| warn!("other machines have to name this one: {error}")).ok()
}

/// Where other machines reach this one, if it listens on `listened`: IPv4 first.
fn addresses(listened: IpAddr) -> Vec<IpAddr> {
    if !listened.is_unspecified() {
        return vec![listened];
    }
    let is_useful = |ip: &IpAddr| match ip {
        IpAddr::V4(ip) => !ip.is_loopback() && !ip.is_link_local(),
        // The listener is one of IPv4, unless the address of an interface was given.
        IpAddr::V6(ip) => listened.is_ipv6() && !ip.is_loopback() && !ip.is_unicast_link_local(),
    };
    let found = if_addrs::get_if_addrs().unwrap_or_default();
    let mut addresses: Vec<_> = found.iter().map(if_addrs::Interface::ip).filter(is_useful).collect();
    addresses.sort();
    addresses.dedup();
    addresses
}

/// Opens invitations for the page of a server.
pub struct Invitations {
    /// The text of the cluster's key.
    key: String,
    name: NodeName,
    last: Mutex<Option<OpenInvitation>>,
}

impl Invitations {
    pub fn new(key: String, name: NodeName) -> Self {
        Self { key, name, last: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, Option<OpenInvitation>> {
        self.last.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inviter for Invitations {
    fn open(&self) -> Result<InvitationSnapshot, String> {
        let mut last = self.lock();
        let snapshot = last.as_ref().map(OpenInvitation::snapshot);
        if let Some(open) = snapshot.filter(|last| matches!(last.state, InvitationState::Open { .. })) {
            return Ok(open);
        }
        let (key, name) = (self.key.clone(), self.name.clone());
        let settings = InvitationSettings { key, name, listen: None, time: TIME_DEFAULT, is_announced: true };
        let opened = OpenInvitation::open(settings).map_err(|error| format!("{error:#}"))?;
        let snapshot = opened.snapshot();
        info!(port = snapshot.port, "a machine is invited to join the cluster");
        *last = Some(opened);
        Ok(snapshot)
    }

    fn last(&self) -> Option<InvitationSnapshot> {
        self.lock().as_ref().map(OpenInvitation::snapshot)
    }

    /// Returns when the listener is closed.
    fn close(&self) {
        if let Some(last) = &*self.lock() {
            last.close();
            while last.wait(usize::MAX - 1, Duration::from_secs(1)).end.is_none() {}
        }
    }
}
