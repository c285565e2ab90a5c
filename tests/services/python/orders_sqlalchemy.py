from sqlalchemy import cast, create_engine, func, select
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column
from sqlalchemy.types import BigInteger


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    stream_id: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    total: Mapped[int]


def place(session: Session, total: int) -> None:
    fact = func.tidemark.append("orders", cast({"total": total}, JSONB))
    session.add(Order(stream_id=session.scalar(select(fact)), total=total))


engine = create_engine("postgresql+psycopg://")

with Session(engine) as session, session.begin():
    place(session, 40)

with Session(engine) as session:
    place(session, 41)
    session.rollback()  # it did not happen, and its ID is void

with Session(engine) as session, session.begin():
    place(session, 42)
