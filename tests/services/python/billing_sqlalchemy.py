import time

from sqlalchemy import BigInteger, create_engine, func, select
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    stream_id: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    total: Mapped[int]


class Invoice(Base):
    __tablename__ = "invoices"
    number: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    stream_id: Mapped[int] = mapped_column(BigInteger)
    total: Mapped[int]


def bill(session: Session) -> bool:
    take = func.tidemark_reader.take("orders", "billing").table_valued("low", "high", "late")
    taken = session.execute(select(take)).first()
    if taken is None:
        return False  # nothing is new
    is_new = (Order.stream_id > taken.low) & (Order.stream_id <= taken.high) | Order.stream_id.in_(taken.late)
    for order in session.scalars(select(Order).where(is_new).order_by(Order.stream_id)):
        session.add(Invoice(stream_id=order.stream_id, total=order.total))
    return True


engine = create_engine("postgresql+psycopg://")
while True:
    with Session(engine) as session, session.begin():
        more = bill(session)
    if not more:
        time.sleep(0.1)
