//! Injects a [`Fault`](crate::worker::Fault) into the requests of a rank. Only in builds with debug assertions.

use std::thread;
use std::time::Instant;

use super::{RankServer, panic_kind};
use crate::protocol::{ErrorKind, LineMessage as _, RankRequest, WriteError};
use crate::worker::fault::{FaultAction, Point};
use crate::worker::queue::RequestQueue;
use crate::worker::request_error::RequestError;

impl RankServer {
    /// As [`Process::answer`], with fault injection.
    pub(super) fn handle_with_fault(&mut self, request: RankRequest, queue: &RequestQueue) -> Result<(), WriteError> {
        let Some((point, action)) = point(&request).and_then(|point| Some((point, self.trigger(point)?))) else {
            return self.answer(request, queue);
        };
        let (op, id, kind, begun) = (request.op(), request.id(), panic_kind(&request), Instant::now());
        match action {
            FaultAction::CloseStdout => {
                self.replies.close();
                self.answer(request, queue)
            }
            FaultAction::Oom => {
                // Like any other error, it aborts the epoch of a step.
                if point == Point::Step {
                    self.collective.abandon();
                }
                let message = "not enough memory (a fault that was asked for)";
                self.write(queue, op, id, Err(RequestError::new(ErrorKind::InsufficientMemory, message)))
            }
            FaultAction::Panic => {
                let done = self.guard(kind, |_| panic!("a fault that was asked for"));
                self.write(queue, op, id, done)
            }
            FaultAction::Slow => {
                let done = self.guard(kind, |process| process.handle(&request));
                if let Some(fault) = &self.fault {
                    thread::sleep(fault.delay(begun.elapsed()));
                }
                self.write(queue, op, id, done)
            }
            FaultAction::Garbage => {
                let _ = self.guard(kind, |process| process.handle(&request));
                self.replies.garble()
            }
            // Exit and kill have ended the process; after a stop it may have been continued.
            FaultAction::Exit | FaultAction::Kill | FaultAction::Stop => self.answer(request, queue),
        }
    }

    /// Injects a fault at a point without a request.
    pub(super) fn inject_idle_fault(&mut self, point: Point) -> Result<(), WriteError> {
        match self.trigger(point) {
            Some(FaultAction::Garbage) => self.replies.garble(),
            Some(FaultAction::CloseStdout) => {
                self.replies.close();
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn trigger(&mut self, point: Point) -> Option<FaultAction> {
        self.fault.as_mut()?.trigger(self.rank, point)
    }
}

fn point(request: &RankRequest) -> Option<Point> {
    match request {
        RankRequest::Attach { .. } | RankRequest::Join { .. } | RankRequest::Init { .. } => Some(Point::Init),
        RankRequest::Load { .. } | RankRequest::LoadDenseShard { .. } => Some(Point::Load),
        RankRequest::Step { .. } | RankRequest::GenerateStep { .. } => Some(Point::Step),
        RankRequest::UnloadModel { .. } | RankRequest::Shutdown => Some(Point::Unload),
        _ => None,
    }
}
