"""A reply that comes while something is sent on the same socket is read all the same."""

from __future__ import annotations

import asyncio

import zmq
import zmq.asyncio
from jupyter_client.channels import AsyncZMQSocketChannel
from jupyter_client.session import Session

from cbviz.app import serve


def test_a_reply_that_comes_while_a_message_is_sent_is_heard() -> None:
    serve.hear_replies()
    session = Session(key=b"key")

    async def wait_send_and_hear() -> str:
        # given a client that waits for the reply to what it asked
        context = zmq.asyncio.Context()
        kernel = zmq.Context(context).socket(zmq.ROUTER)
        port = kernel.bind_to_random_port("tcp://127.0.0.1")
        client = context.socket(zmq.DEALER)
        client.connect(f"tcp://127.0.0.1:{port}")
        channel = AsyncZMQSocketChannel(client, session)
        try:
            channel.send(session.msg("execute_request"))
            ids, _ = session.feed_identities(kernel.recv_multipart())
            waits = asyncio.ensure_future(channel.get_msg())
            await asyncio.sleep(0.1)  # it waits
            # when the reply is there, and before the loop has looked something else is sent on that socket
            session.send(kernel, session.msg("execute_reply"), ident=ids)
            sent = zmq.Socket.shadow(client.underlying)
            assert sent.poll(10_000)
            channel.send(session.msg("comm_msg"))
            # then
            message = await asyncio.wait_for(waits, 10)
            return str(message["msg_type"])
        finally:
            client.close(linger=0)
            kernel.close(linger=0)
            context.term()

    assert asyncio.run(wait_send_and_hear()) == "execute_reply"
