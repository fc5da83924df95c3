//! How the ranks of one `comm_id` find each other on this host, as NCCL's do.
//!
//! Rank 0 makes the segment and listens on a Unix socket whose name is derived from the id. The socket is abstract: it
//! is not in the file system, and it is gone when its process ends. The other ranks connect and send a greeting with
//! their rank. When all are connected, rank 0 sends them the segment's descriptor; they join its group and confirm.
//! When all have joined, rank 0 sends them the go-ahead. Both sides check that the other belongs to the same user.
//! Every wait ends at the deadline, and a rank that gives up closes its connections, which the others see. The
//! connections stay open as long as the group exists: see [`Peers`](super::peers::Peers).

use std::collections::BTreeMap;
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::thread;
use std::time::{Duration, Instant};

use rustix::net::sockopt::{Timeout, set_socket_timeout, socket_peercred};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    recvmsg, sendmsg,
};
use rustix::process::geteuid;
use types::Rank;

use collectives::CommError;
use collectives::shared_memory::{GroupLimits, Segment, SegmentError, ShmComm};

/// Digits of NCCL's unique id. Shorter ids are valid too.
const COMM_ID_DIGITS_MAX: usize = 256;

/// How often a rank tries to connect to rank 0.
const RETRY_EVERY: Duration = Duration::from_millis(10);
/// How long a greeting may take: other connections wait meanwhile.
const GREETING_MAX: Duration = Duration::from_millis(500);

/// How long a rank tries to connect before it checks whether a process on this host is rank 0.
const RANK_ZERO_GRACE: Duration = Duration::from_secs(2);

const MAGIC: [u8; 8] = *b"consort2";
const GREETING_BYTES: usize = MAGIC.len() + 32 + 4;

/// Messages of one byte: join the group (sent with the descriptor), joined, go ahead.
const JOIN: u8 = 1;
const JOINED: u8 = 2;
const GO: u8 = 3;

#[derive(Debug, thiserror::Error)]
pub enum RendezvousError {
    #[error("a comm_id is up to {COMM_ID_DIGITS_MAX} hexadecimal digits")]
    CommId,
    #[error("the ranks did not all come in time")]
    Deadline,
    #[error("rank 0 did not listen in time")]
    NoHost,
    #[error(
        "no process here is rank 0: CPU ranks meet in shared memory, which a leader that is rank 0 itself cannot join, so it \
         starts `consort --worker --rank 0` like the others"
    )]
    NoRankZero,
    #[error("{what}")]
    Io { what: &'static str, source: io::Error },
    #[error("the other side belongs to another user")]
    Stranger,
    #[error("rank 0 broke off")]
    BrokenOff,
    #[error(transparent)]
    Segment(#[from] SegmentError),
    #[error(transparent)]
    Group(#[from] CommError),
}

/// A rank after its rendezvous.
#[derive(Debug)]
pub struct JoinedGroup {
    pub comm: ShmComm,
    pub segment: Segment,
    /// On rank 0: to each other rank. On the other ranks: to rank 0.
    pub connections: Vec<(Rank, UnixStream)>,
}

/// The parameters that all ranks of a rendezvous share.
#[derive(Clone, Debug)]
pub struct Rendezvous {
    key: blake3::Hash,
    limits: GroupLimits,
    deadline: Instant,
}

impl Rendezvous {
    pub fn new(comm_id: &str, limits: GroupLimits, deadline: Instant) -> Result<Self, RendezvousError> {
        let is_id = (1..=COMM_ID_DIGITS_MAX).contains(&comm_id.len()) && comm_id.bytes().all(|c| c.is_ascii_hexdigit());
        if !is_id {
            return Err(RendezvousError::CommId);
        }
        let mut hash = blake3::Hasher::new_derive_key("consort 2026 ranks of one comm_id");
        hash.update(&geteuid().as_raw().to_le_bytes());
        hash.update(comm_id.to_ascii_lowercase().as_bytes());
        Ok(Self { key: hash.finalize(), limits, deadline })
    }

    /// Waits until all ranks have joined the group. `is_over` cancels it. `has_rank_zero` tells whether a process
    /// exists that could be rank 0.
    pub fn meet(
        &self,
        rank: Rank,
        is_over: &dyn Fn() -> bool,
        has_rank_zero: &dyn Fn() -> bool,
    ) -> Result<JoinedGroup, RendezvousError> {
        assert_eq!(rank.world(), self.limits.world, "a rank meets its own group");
        if rank.index() == 0 { self.host(rank, is_over) } else { self.join(rank, is_over, has_rank_zero) }
    }

    fn host(&self, rank: Rank, is_over: &dyn Fn() -> bool) -> Result<JoinedGroup, RendezvousError> {
        let (segment, fd) = Segment::create(self.limits)?;
        let comm = segment.join(rank, segment.epoch())?;
        if rank.world().get() == 1 {
            return Ok(JoinedGroup { comm, segment, connections: Vec::new() });
        }
        let mut guests = self.gather(is_over)?;
        for guest in guests.values_mut() {
            send_with(guest, JOIN, &fd).map_err(io("hand out the segment"))?;
        }
        for guest in guests.values_mut() {
            self.expect(guest, JOINED)?;
        }
        for guest in guests.values_mut() {
            guest.write_all(&[GO]).map_err(io("tell the ranks to go on"))?;
        }
        let known = |(index, stream)| rank.world().rank(index).map(|rank| (rank, stream));
        Ok(JoinedGroup { comm, segment, connections: guests.into_iter().filter_map(known).collect() })
    }

    /// A connection to each of the other ranks.
    fn gather(&self, is_over: &dyn Fn() -> bool) -> Result<BTreeMap<u16, UnixStream>, RendezvousError> {
        let listener = self.listen(is_over)?;
        let mut guests = BTreeMap::new();
        while guests.len() + 1 < self.limits.world.get() {
            let left = self.left(is_over)?.min(GREETING_MAX);
            set_socket_timeout(&listener, Timeout::Recv, Some(left))
                .map_err(|error| io("wait for ranks")(error.into()))?;
            match listener.accept() {
                Ok((stream, _)) => match self.greeted(stream) {
                    // A rank that connects twice has given up its first connection.
                    Some((index, stream)) => drop(guests.insert(index, stream)),
                    None => tracing::warn!("someone connected who is no rank of this group"),
                },
                Err(error) if is_timeout(&error) => {}
                Err(error) => return Err(io("wait for ranks")(error)),
            }
        }
        Ok(guests)
    }

    fn listen(&self, is_over: &dyn Fn() -> bool) -> Result<UnixListener, RendezvousError> {
        loop {
            match self.address().and_then(|address| UnixListener::bind_addr(&address)) {
                // Another group of the same id may be about to finish its rendezvous.
                Err(error) if error.kind() == io::ErrorKind::AddrInUse => self.pause(is_over)?,
                bound => return bound.map_err(io("listen for the other ranks")),
            }
        }
    }

    /// Reads the greeting. Returns the peer's rank; `None` if it is not of this group.
    fn greeted(&self, mut stream: UnixStream) -> Option<(u16, UnixStream)> {
        let mut greeting = [0; GREETING_BYTES];
        check_user(&stream).ok()?;
        stream.set_read_timeout(Some(GREETING_MAX)).ok()?;
        stream.read_exact(&mut greeting).ok()?;
        let index = u16::from_le_bytes([greeting[GREETING_BYTES - 4], greeting[GREETING_BYTES - 3]]);
        let rank = self.limits.world.rank(index).filter(|rank| rank.index() > 0)?;
        (greeting == self.greeting(rank)).then_some((index, stream))
    }

    fn join(
        &self,
        rank: Rank,
        is_over: &dyn Fn() -> bool,
        has_rank_zero: &dyn Fn() -> bool,
    ) -> Result<JoinedGroup, RendezvousError> {
        let mut alone_since = Some(Instant::now());
        let (mut host, fd) = loop {
            // Until rank 0 has replied, its listener may belong to a failed attempt; then a new one follows.
            match self.call(rank) {
                Ok(called) => break called,
                Err(RendezvousError::Io { .. } | RendezvousError::BrokenOff) => {}
                Err(other) => return Err(other),
            }
            if alone_since.is_some_and(|since| since.elapsed() >= RANK_ZERO_GRACE) {
                if !has_rank_zero() {
                    return Err(RendezvousError::NoRankZero);
                }
                alone_since = None; // rank 0 exists, so only the deadline limits the wait
            }
            self.pause(is_over).map_err(|_| RendezvousError::NoHost)?;
        };
        let segment = Segment::attach(fd, self.limits)?;
        let comm = segment.join(rank, segment.epoch())?;
        host.write_all(&[JOINED]).map_err(io("tell rank 0 of joining"))?;
        self.expect(&mut host, GO)?;
        let first = rank.world().rank(0).expect("every group has a rank 0");
        Ok(JoinedGroup { comm, segment, connections: vec![(first, host)] })
    }

    /// Connects to rank 0 and waits until it sends the segment's descriptor.
    fn call(&self, rank: Rank) -> Result<(UnixStream, OwnedFd), RendezvousError> {
        let address = self.address().map_err(io("name the socket of rank 0"))?;
        let mut host = UnixStream::connect_addr(&address).map_err(io("connect to rank 0"))?;
        check_user(&host)?;
        host.write_all(&self.greeting(rank)).map_err(io("greet rank 0"))?;
        self.limit(&host)?;
        match receive_with(&host) {
            Ok((JOIN, Some(fd))) => Ok((host, fd)),
            Ok(_) => Err(RendezvousError::BrokenOff),
            Err(error) if is_timeout(&error) => Err(RendezvousError::Deadline),
            Err(error) => Err(io("wait for rank 0")(error)),
        }
    }

    /// Waits for this byte.
    fn expect(&self, stream: &mut UnixStream, byte: u8) -> Result<(), RendezvousError> {
        self.limit(stream)?;
        let mut found = [0];
        match stream.read_exact(&mut found) {
            Ok(()) if found == [byte] => Ok(()),
            Err(error) if is_timeout(&error) => Err(RendezvousError::Deadline),
            _ => Err(RendezvousError::BrokenOff),
        }
    }

    /// Sets the read timeout of `stream` to the deadline.
    fn limit(&self, stream: &UnixStream) -> Result<(), RendezvousError> {
        stream.set_read_timeout(Some(self.left(&|| false)?)).map_err(io("set a deadline"))
    }

    fn left(&self, is_over: &dyn Fn() -> bool) -> Result<Duration, RendezvousError> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() || is_over() { Err(RendezvousError::Deadline) } else { Ok(left) }
    }

    fn pause(&self, is_over: &dyn Fn() -> bool) -> Result<(), RendezvousError> {
        thread::sleep(self.left(is_over)?.min(RETRY_EVERY));
        Ok(())
    }

    fn address(&self) -> io::Result<SocketAddr> {
        SocketAddr::from_abstract_name(format!("consort-{}", self.key.to_hex()))
    }

    fn greeting(&self, rank: Rank) -> [u8; GREETING_BYTES] {
        let mut greeting = [0; GREETING_BYTES];
        let (magic, rest) = greeting.split_at_mut(MAGIC.len());
        magic.copy_from_slice(&MAGIC);
        rest[..32].copy_from_slice(self.key.as_bytes());
        rest[32..34].copy_from_slice(&(rank.index() as u16).to_le_bytes());
        rest[34..].copy_from_slice(&(rank.world().get() as u16).to_le_bytes());
        greeting
    }
}

fn check_user(stream: &UnixStream) -> Result<(), RendezvousError> {
    let peer = socket_peercred(stream).map_err(|error| io("ask who the other side is")(error.into()))?;
    if peer.uid == geteuid() { Ok(()) } else { Err(RendezvousError::Stranger) }
}

fn send_with(stream: &UnixStream, byte: u8, fd: &OwnedFd) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds = [fd.as_fd()];
    assert!(control.push(SendAncillaryMessage::ScmRights(&fds)), "there is space for one descriptor");
    sendmsg(stream, &[IoSlice::new(&[byte])], &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// Receives a byte, and a descriptor if one came with it; the byte is 0 at the end of the stream.
fn receive_with(stream: &UnixStream) -> io::Result<(u8, Option<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    recvmsg(stream, &mut [IoSliceMut::new(&mut byte)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    let fd = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
        _ => None,
    });
    Ok((byte[0], fd))
}

fn is_timeout(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut)
}

fn io(what: &'static str) -> impl Fn(io::Error) -> RendezvousError {
    move |source| RendezvousError::Io { what, source }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use super::*;
    use collectives::Communicator as _;
    use types::WorldSize;

    /// Far longer than a test takes.
    const PATIENCE: Duration = Duration::from_secs(60);

    fn meeting(test: &str, world: u16, timeout: Duration) -> Rendezvous {
        let id = blake3::hash(format!("{test} {}", std::process::id()).as_bytes()).to_hex();
        let limits = GroupLimits { world: WorldSize::new(world).unwrap(), elements_max: 64 };
        Rendezvous::new(&id, limits, Instant::now() + timeout).unwrap()
    }

    fn meet(meeting: &Rendezvous, rank: Rank) -> Result<JoinedGroup, RendezvousError> {
        meeting.meet(rank, &|| false, &|| true)
    }

    fn all_meet(meeting: &Rendezvous) -> Vec<Result<JoinedGroup, RendezvousError>> {
        thread::scope(|scope| {
            let meet = |rank| scope.spawn(move || meet(meeting, rank));
            let ranks: Vec<_> = meeting.limits.world.ranks().map(meet).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }

    #[test]
    fn the_ranks_of_one_id_find_each_other_and_can_add() {
        for world in 1..=4 {
            let meeting = meeting("add", world, PATIENCE);
            // A second time with the same id: the first run leaves nothing behind.
            for _ in 0..2 {
                let met: Vec<_> = all_meet(&meeting).into_iter().map(Result::unwrap).collect();
                thread::scope(|scope| {
                    for JoinedGroup { mut comm, connections, .. } in met {
                        let others = if comm.rank().index() == 0 { usize::from(world) - 1 } else { 1 };
                        assert_eq!(connections.len(), others);
                        scope.spawn(move || {
                            let mut values = [1.0];
                            comm.all_reduce(&mut values).unwrap();
                            assert_eq!(values, [f32::from(world)]);
                            // Communicators are dropped only when all ranks are done with them.
                            comm.all_reduce(&mut values).unwrap();
                        });
                    }
                });
            }
        }
    }

    #[test]
    fn a_rank_that_does_not_come_is_waited_for_until_the_deadline() {
        let meeting = meeting("missing", 3, Duration::from_millis(200));
        let [host, guest, _] = [0, 1, 2].map(|index| meeting.limits.world.rank(index).unwrap());
        assert!(matches!(meet(&meeting, host), Err(RendezvousError::Deadline)));
        assert!(matches!(meet(&meeting, guest), Err(RendezvousError::NoHost)));
    }

    #[test]
    fn a_group_without_a_rank_zero_is_not_waited_for() {
        let meeting = meeting("no rank 0", 2, Duration::from_secs(1 << 20));
        let guest = meeting.limits.world.rank(1).unwrap();
        let met = meeting.meet(guest, &|| false, &|| false);
        assert!(matches!(met, Err(RendezvousError::NoRankZero)), "{met:?}");
    }

    #[test]
    fn who_is_over_waits_no_longer() {
        let meeting = meeting("over", 2, PATIENCE);
        let rank = meeting.limits.world.rank(0).unwrap();
        assert!(matches!(meeting.meet(rank, &|| true, &|| true), Err(RendezvousError::Deadline)));
    }

    #[test]
    fn strangers_do_not_keep_the_ranks_apart() {
        let meeting = meeting("strangers", 2, PATIENCE);
        thread::scope(|scope| {
            let ranks: Vec<_> = meeting.limits.world.ranks().collect();
            let meeting = &meeting;
            let host = scope.spawn(move || meet(meeting, ranks[0]));
            let connect = || loop {
                match UnixStream::connect_addr(&meeting.address().unwrap()) {
                    Ok(stream) => return stream,
                    Err(_) => thread::yield_now(),
                }
            };
            let silent = connect();
            connect().write_all(&[0xff; 3 * GREETING_BYTES]).unwrap();
            let guest = meeting.limits.world.rank(1).unwrap();
            let comm = meet(meeting, guest).unwrap().comm;
            assert_eq!(host.join().unwrap().unwrap().comm.epoch(), comm.epoch());
            drop(silent);
        });
    }

    #[test]
    fn an_id_is_hexadecimal_digits() {
        let limits = GroupLimits { world: WorldSize::ONE, elements_max: 1 };
        let check = |id: &str| Rendezvous::new(id, limits, Instant::now()).is_ok();
        assert!(check("deadbeef") && check(&"0F".repeat(128)));
        assert!(!check("") && !check("xyz") && !check(&"0".repeat(257)) && !check("dead beef"));
    }
}
